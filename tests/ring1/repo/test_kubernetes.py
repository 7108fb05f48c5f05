"""What docs/kubernetes.md names is there."""

import re

import yaml

from tests import ROOT

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def test_values_that_the_page_names_are_there() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "hps" / "values.yaml").read_text())
    files_and_settings = {"service.drain_s", "tokens.json", "tls.crt", "tls.key"}
    named = set(re.findall(r"`(\w+\.\w+)", PAGE)) - files_and_settings
    ours = {name for name in named if name.partition(".")[0] in values}
    assert len(ours) > 8
    assert [name for name in sorted(ours) if name.partition(".")[2] not in values[name.partition(".")[0]]] == []
