"""What the templates of the Helm chart say, read as text; `ring2/deploy/test_helm.py` renders them."""

import re

from tests import ROOT

TEMPLATES = ROOT / "deploy" / "helm" / "hps" / "templates"
LINES = [line for path in sorted(TEMPLATES.iterdir()) for line in path.read_text().splitlines()]


def test_every_query_of_the_chart_is_of_its_own_namespace() -> None:
    """The load of staging must not scale production."""
    queries = [line for line in LINES if re.search(r"^ *(query|expr):|\bhps_\w+\{", line)]
    assert len(queries) == 2, "the selector that the rules get, and KEDA's query"
    for line in queries:
        metrics = re.findall(r"\bhps_\w+(?=\W)(\{namespace=)?", line)
        assert metrics, line
        assert all(metrics), line
        assert ".Release.Namespace" in line
