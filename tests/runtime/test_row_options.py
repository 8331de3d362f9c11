"""What rows remember of their tenants' wishes."""

import numpy as np

from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission
from forebay.runtime.sampling.row_options import RowOptions


def admitted(options: RowOptions, params: SamplingParams) -> None:
    tokens = np.arange(5, dtype=np.int32)
    options.admit(Admission(row=1, request_id=1, params=params, token_ids=tokens, num_prompt=5))


def test_row_options_next_tenant_frees_the_prompt_of_the_last_one():
    options = RowOptions(3)
    admitted(options, SamplingParams(prompt_logprobs=2))
    assert len(options._prompts[1]) == 5
    admitted(options, SamplingParams())
    assert not options._prompts
