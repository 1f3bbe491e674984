"""What is noted under a run of a cell's loop that is another thing on several ranks, or
with `--accumulate`, than in one process with whole batches."""

from collections.abc import Iterator

from labkit.rank.code.batch_sizes import update_by_batch_size
from labkit.rank.code.batch_sizes import use_of_batch_size
from labkit.rank.code.carried import count_of_microbatches
from labkit.rank.code.carried import taken_before
from labkit.rank.code.exchanges import sum_over_all
from labkit.rank.code.kept_samples import count_by_dataset
from labkit.rank.code.kept_samples import kept_of_samples
from labkit.rank.code.loop_body import extra_work
from labkit.strategies import Strategy
from labkit.train_options import TrainOptions

SIZE_OF_PART = (
    "{use}: the size of a batch in the loop is that of this rank's part, where one "
    "process has the whole batch. To train with it, sum it over the ranks first: "
    "size = torch.tensor(len(x)); dist.all_reduce(size, group=loader.group)"
)
KEPT_OF_PART = (
    "{use}: what the loop keeps from batch to batch, and computes its loss with, is of "
    "this rank's samples, where one process keeps that of all samples. Bring it "
    "together before it is kept: an average by dist.all_reduce(mean, "
    "op=dist.ReduceOp.AVG, group=loader.group), samples of a queue by "
    "dist.all_gather(list, keys, group=loader.group). What it keeps of each sample for "
    "that sample alone, and finds again on the same rank, is right as it is"
)
COUNT_OF_PART = (
    "{use}: what the loop counts is of this rank's samples, where one process counts "
    "those of the whole dataset, so with {count} ranks the quotient is too small. "
    "Divide by the number of samples that the loop has had, seen += len(x), or sum the "
    "count over the ranks first: dist.all_reduce(count, group=loader.group), where it "
    "is a tensor"
)
TAKEN_OF_PART = (
    "{use}: what the loop trains by is counted or averaged in a pass over the loader, "
    "which gives this rank its own samples alone, so each rank has another number than "
    "one process. Take it of all samples, before prepare or from loader.dataset, or "
    "sum it over the ranks: dist.all_reduce(count, group=loader.group)"
)
SUM_OF_SAME = (
    "{use}: under {strategy} {same} ranks have the same samples, and over all ranks "
    "this has each of them {same} times. Take it over the ranks that share a batch, "
    "which is right under any strategy: group=loader.group"
)
GRADIENTS_OF_SOME = (
    "a cell before this one ended between a backward pass and the step, and not after "
    "the same line on all ranks, so the gradients that it has left are dropped"
)
GRADIENTS_BEFORE = (
    "parameters have gradients from before prepare, which one process adds to those of "
    "the first step, and {strategy} has dropped. Call optimizer.zero_grad() before "
    "prepare"
)
WRITES = (
    "the model's forward changes its parameter {name}: with --accumulate {count} it "
    "does so for each of the {count} parts of a batch, where one process with whole "
    "batches does it once. Unless it comes to the same, leave out --accumulate, or "
    "make that change in the loop, after optimizer.step(), under "
    "`if not optimizer.held_back:`"
)
EXTRA_WORK = (
    "{work}: with --accumulate {count} the loop body runs {count} times per step and "
    "does this each time, where one process with whole batches does it once. Put what "
    "is to be done once per step after optimizer.step(), under "
    "`if not optimizer.held_back:` (but clip gradients before the step)"
)
COUNT_OF_MICROBATCHES = (
    "{use}: with --accumulate {count} this counts {count} microbatches for each step, "
    "where one process with whole batches counts steps, and the loop trains by it. "
    "Count under `if not optimizer.held_back:`, after optimizer.step()"
)
OWN_STATISTICS = (
    "a BatchNorm of a model that prepare did not get, such as that of an average or a "
    "target network that is built beside, takes the statistics of this rank's samples "
    "alone, where one process has those of the whole batch: --sync-batchnorm is for "
    "the layers of prepared models and their copies. Make that model of the prepared "
    "one, after prepare: copy.deepcopy(model), or AveragedModel(model)"
)
TRAINED_ON_SHARE = (
    "the loop takes optimizer steps while it goes through loader.share(...), which is "
    "for evaluation: rank 0 has the first part of that dataset, the next rank the next "
    "one. A step that is taken on them has other samples together than in one process; "
    "an evaluation between steps is right. To train on two datasets, iterate over a "
    "plain DataLoader of the other one beside the loader: every rank then has its "
    "whole batches, and a mean over these is that of one process. Where each sample "
    "goes with one of the other dataset, give prepare both as one: "
    "torch.utils.data.StackDataset(a, b), which is divided among the ranks"
)


def of_text(
    code: str,
    strategy: Strategy,
    options: TrainOptions,
    *,
    num_ranks: int,
    num_alike: int,
    is_sum: bool,
    is_loader: bool,
) -> Iterator[str]:
    """What the text of a cell shows, before its loop begins.

    `num_ranks` share a batch, `num_alike` have the same samples each; `is_sum` where
    the loss is a sum over them; `is_loader` where `prepare` gets a DataLoader.
    """
    if num_ranks > 1 and (use := use_of_batch_size(code)):
        yield SIZE_OF_PART.format(use=use.removesuffix(":"))
    if num_ranks > 1 and (use := kept_of_samples(code)):
        yield KEPT_OF_PART.format(use=use)
    if num_ranks > 1 and (use := count_by_dataset(code, is_loader=is_loader)):
        yield COUNT_OF_PART.format(use=use, count=num_ranks)
    if num_ranks > 1 and (use := taken_before(code)):
        yield TAKEN_OF_PART.format(use=use.removesuffix(":"))
    if num_alike > 1 and (use := sum_over_all(code)):
        yield SUM_OF_SAME.format(use=use, strategy=strategy.name, same=num_alike)
    if options.accumulate > 1 and (work := extra_work(code)):
        count = options.accumulate
        yield EXTRA_WORK.format(work=work.removesuffix(":"), count=count)
    elif options.accumulate > 1 and (use := count_of_microbatches(code)):
        yield COUNT_OF_MICROBATCHES.format(use=use, count=options.accumulate)
    if num_ranks > 1 and is_sum and (use := update_by_batch_size(code)):
        yield SIZE_OF_PART.format(use=use)
