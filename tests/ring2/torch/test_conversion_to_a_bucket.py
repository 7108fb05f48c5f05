"""A converted module's weights pass through an object store to a server that reads it."""

import pytest
import torch
from torch import nn

from hps import HPS
from hps.torch import convert
from tests.servers.running_service import document_of
from tests.servers.s3_server import know_only_moto, s3_server

DIM, ROWS = 6, 40


@pytest.mark.s3
def test_weights_pass_through_a_bucket_that_the_server_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    know_only_moto(monkeypatch)
    repository = f"s3://{s3_server().new_bucket()}/models"
    s3_server().put(f"{repository}/README", b"")
    source = {"s3_endpoint_url": s3_server().url}
    with HPS(document_of(model_repository=repository, model_source=source)) as server:
        for version in ("1", "2"):
            embedding = nn.Embedding(ROWS, DIM)
            converted = convert(embedding, server, "shop", repository=repository)
            assert server.model("shop").version == version
            assert torch.equal(converted(torch.arange(ROWS)), embedding.weight)
