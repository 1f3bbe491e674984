"""What a loop loads into its models, and of which step it is."""

import copy
import io

import torch
from torch import nn

from labkit.rank.training.loaded_states import LoadedStates


def numbers_of(taken_at: int, loaded_at: int, *, is_trained: bool = True) -> int:
    model, steps = nn.Sequential(nn.Linear(2, 2)), [taken_at]
    states = LoadedStates(lambda each: is_trained, lambda: steps[0])
    with states.watching():
        state = copy.deepcopy(model.state_dict())
        steps[0] = 100
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        steps[0] = loaded_at
        model.load_state_dict(torch.load(file, weights_only=True))
    return states.number


def test_ranks_that_load_the_same_have_one_number() -> None:
    assert numbers_of(3, 5) == numbers_of(3, 5)
    assert len({numbers_of(3, 5), numbers_of(4, 5), numbers_of(3, 6)}) == 3
    assert numbers_of(3, 5, is_trained=False) == numbers_of(4, 5, is_trained=False)


def test_nothing_is_left_after_a_run() -> None:
    take, load = nn.Module.state_dict, nn.Module.load_state_dict
    numbers_of(1, 2)
    assert (nn.Module.state_dict, nn.Module.load_state_dict) == (take, load)
    about = nn.Linear(2, 2).state_dict()._metadata
    assert about == {"": {"version": 1}}
