"""A catalogue of modules that `hps.torch.package` must take or refuse: written in our own words after what is published.

Each form says how its inputs are drawn and at which sizes they must be answered; `form.py` explains. The examples show
neither paddings nor repeated keys, so that an answer is right because of the graph, not because of the examples.
"""

from tests.tables.torch_forms import jagged, lookups, ranking, refusals, sequences, structures, traps
from tests.tables.torch_forms.form import FORMS as FORMS
from tests.tables.torch_forms.form import Form as Form

__all__ = ["FORMS", "Form", "jagged", "lookups", "ranking", "refusals", "sequences", "structures", "traps"]
