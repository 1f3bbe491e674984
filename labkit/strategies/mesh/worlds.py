"""The worlds that this process has been a rank of: where the lab has another number of
ranks, what was made for the former ones is of no use any more."""

from labkit.checks import UnsupportedLoopError

ALONE = -1
"""The world of what needs no other rank: it is never over."""

MODEL = (
    "this model and its optimizer were made for {lab}: they would train with only some "
    "of the samples or parameters. Make both again and prepare them, in a %%dist_train "
    "cell; --resume, or load_checkpoint, goes on from a checkpoint of any number of "
    "ranks"
)
WRAPPED = (
    "this DistributedDataParallel was made for {lab}: it would train with only some of "
    "the samples. Wrap its module again: "
    "DistributedDataParallel(model.module)"
)
LOADER = (
    "this loader was made for {lab}: it would give only some of the samples, or some "
    "twice. Make the model and the optimizer again, and use the loader that prepare "
    "gives with them, in a %%dist_train cell"
)
SHARE = (
    "this loader.share was made for {lab}: it would give only some of the samples, or "
    "some twice. Call share again, on the loader that prepare gives now"
)
SAMPLER = (
    "this DistributedSampler was made for {lab}: it would give only some of the "
    "samples, or some twice. Make it again, and the DataLoader that has it"
)
"""What is refused in another lab, and what to do: by what it is."""

_over: list[str] = []
"""Of each world that is, how many ranks its lab and the next have, in words: in the
order of their numbers."""


def current_world() -> int:
    """The number of the world of today."""
    return len(_over)


def begin_world(lab: str) -> None:
    """There is another world from now on; `lab` is the former one, in words."""
    _over.append(lab)


def check_world(world: int, why: str) -> None:
    """UnsupportedLoopError, one of those above, unless the world of this number is that
    of today."""
    if world != ALONE and world < len(_over):
        raise UnsupportedLoopError(why.format(lab=_over[world]))
