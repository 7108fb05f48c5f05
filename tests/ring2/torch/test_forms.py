"""Forms of the catalogue are answered as their modules do, or refused for their reason. Never wrongly.

Here are some of each kind, `tests/nightly/torch/test_every_form.py` has all. `python -m tests.tables.torch_forms` prints them.
"""

from pathlib import Path

import pytest

from tests.tables.torch_forms import FORMS
from tests.tables.torch_forms.judge import judge

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.export's and torchrec's

PUBLISHED = (
    "DLRM",
    "DLRMLists",
    "DCNv2",
    "DIN",
    "SASRec",
    "BERT4Rec",
    "DeepCTRMatrix",
    "TorchRechubDict",
    "DeepFM",
    "TwoTower",
)
PUBLISHED += ("CompositionalHashing", "torchrec_dlrm", "MMoE", "GRU4Rec")
STRUCTURES = ("named_tuple", "variable_keywords", "numbers_and_strings", "awkward_names_of_inputs", "outputs_of_a_dict")
LOOKUPS = (
    "weighted_bags",
    "ends_read_by_the_network",
    "one_offsets_for_two_inputs",
    "bags_of_maxima_by_offsets",
    "clipped_rows",
)
LOOKUPS += ("bfloat16", "uint8_keys", "last_key_by_negative_index", "features_in_another_order", "weighted_collection")
TRAPS = ("batch_one_branch", "branch_on_odd_samples", "one_column_that_broadcasts", "rare_rule_over_samples")
TRAPS += (
    "time_first",
    "candidates_of_all_samples",
    "a_number_as_a_tensor",
    "hooks_of_the_module",
    "cached_mask",
    "python_counter",
)
REFUSED = ("two_levels", "random_for_rare_keys", "packed_sequence", "scaled_table", "scripted", "by_date")


@pytest.mark.parametrize("name", [*PUBLISHED, *STRUCTURES, *LOOKUPS, *TRAPS, *REFUSED])
def test_a_form_is_answered_as_its_module_does_or_refused(name: str, tmp_path: Path) -> None:
    verdict = judge(FORMS[name], tmp_path)
    assert not verdict.faults, verdict.faults
