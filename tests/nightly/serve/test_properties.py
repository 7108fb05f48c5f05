"""The properties of the rooms around the service, for many more examples than ring 1 has time for: others each night."""

import random
from typing import Any

import pytest

from tests.ring1.client import test_client_properties, test_routing
from tests.ring1.ground import test_http1
from tests.ring1.regions import test_descriptors
from tests.ring1.scoring import test_packing
from tests.ring1.serve import (
    test_frontend_lookups,
    test_frontend_slots,
    test_grpc_messages,
    test_inference_protocol_properties,
)

EXAMPLES = 5000
MODULES = [
    test_client_properties,
    test_routing,
    test_descriptors,
    test_packing,
    test_http1,
    test_frontend_lookups,
    test_frontend_slots,
    test_grpc_messages,
    test_inference_protocol_properties,
]
PROPERTIES = {
    f"{module.__name__.rpartition('.')[2]}::{name}": one
    for module in MODULES
    for name, one in vars(module).items()
    if name.startswith("test_") and hasattr(one, "hypothesis")
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_holds_for_many_more_examples(name: str) -> None:
    example: Any = PROPERTIES[name].hypothesis.fuzz_one_input
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")  # which pytest shows if this fails
    rng = random.Random(seed)
    for _ in range(EXAMPLES):
        example(rng.randbytes(rng.randint(1, 2000)))
