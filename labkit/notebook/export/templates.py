"""What a script in plain PyTorch is written from."""

SEED = """\
def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)"""

_ORDER = """\
    def __len__(self):
        return -(-self.num_samples // self.batch_size) * self.accumulate

    def __iter__(self):
        if len(self.dataset) != self.num_samples:
            raise RuntimeError(
                f"the dataset has {len(self.dataset)} samples, and had "
                f"{self.num_samples}: export the run with --style labkit"
            )
        order = torch.arange(self.num_samples)
        if self.shuffle:  # in another order in each epoch, the same on all ranks
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator)
        self.epoch += 1
        for batch in order.split(self.batch_size):
"""
"""The global batches, in both samplers."""

EVEN_BATCHES = (
    '''\
class RankBatches(Sampler):
    """This rank's part of every global batch, in microbatches.

    The global batches are those of DistributedSampler. That deals a batch out sample by
    sample; here a rank has consecutive ones, as in the notebook, so that its losses are
    the same to the last digit.
    """

    def __init__(self, dataset, batch_size, *, shuffle, accumulate, seed):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.dataset, self.num_samples = dataset, len(dataset)
        self.batch_size = batch_size
        self.shuffle, self.accumulate, self.seed = shuffle, accumulate, seed
        self.epoch = 0
        for size in (batch_size, self.num_samples % batch_size):
            if size % (self.world_size * accumulate):
                raise ValueError(
                    f"a batch of {size} samples cannot be cut into {accumulate} equal "
                    f"microbatches for each of {self.world_size} ranks"
                )

'''
    + _ORDER
    + """\
            for microbatch in batch.chunk(self.accumulate):
                yield microbatch.chunk(self.world_size)[self.rank].tolist()"""
)

UNEVEN_BATCHES = (
    '''\
class RankBatches(Sampler):
    """This rank's part of every global batch, in microbatches.

    The global batches are those of DistributedSampler. That deals a batch out sample by
    sample, and repeats some where the last one cannot be cut evenly; here a rank has
    consecutive ones, each sample counts once, and `weight` says what a part's mean
    counts for. So losses are those of the notebook, to the last digit.
    """

    def __init__(self, dataset, batch_size, *, shuffle, accumulate, seed):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.dataset, self.num_samples = dataset, len(dataset)
        self.batch_size = batch_size
        self.shuffle, self.accumulate, self.seed = shuffle, accumulate, seed
        self.epoch = 0
        last = self.num_samples % batch_size or batch_size
        if last < self.world_size * accumulate:
            raise ValueError(
                f"the last batch has {last} samples, too few for {accumulate} "
                f"microbatches on each of {self.world_size} ranks"
            )

'''
    + _ORDER
    + '''\
            for number in range(self.accumulate):
                yield self.part_of(batch, number).tolist()

    def part_of(self, batch, number):
        """This rank's part of microbatch `number`."""
        microbatch = cut(batch, self.accumulate, number)
        return cut(microbatch, self.world_size, self.rank)

    def weight(self, number):
        """What microbatch `number`, of all epochs, counts for: 1 if all are equal."""
        place, number = divmod(number % len(self), self.accumulate)
        batch = range(self.num_samples)[place * self.batch_size :][: self.batch_size]
        share = len(self.part_of(batch, number)) * self.world_size / len(batch)
        return share * self.accumulate


def cut(samples, num_parts, number):
    """One of so many parts, whose sizes differ by one at most."""
    first, end = (-(-each * len(samples) // num_parts) for each in (number, number + 1))
    return samples[first:end]'''
)

WRITE_LOSSES = '''\
def write_losses(path, losses, accumulate, device):
    """The loss of each step, the mean over the samples of all ranks, as CSV."""
    sums = [(loss.item() * num_samples, num_samples) for loss, num_samples in losses]
    sums = torch.tensor(sums, dtype=torch.float64, device=device)
    sums = sums.view(-1, accumulate, 2).sum(1)  # (steps, 2)
    dist.all_reduce(sums)
    means = sums[:, 0] / sums[:, 1]
    if dist.get_rank() == 0:
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "loss"])
            writer.writerows(enumerate(means.tolist(), start=1))'''

SHARD = '''\
def shard(module):
    """Shard the blocks of a model, those in its outermost lists, one by one: a rank
    gathers one of them at a time."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            shard(child)
        elif not isinstance(module, (nn.ModuleList, nn.Sequential)):
            shard(child)
        elif any(True for _ in child.parameters()):
            fully_shard(child)'''

CLIP = '''\
def clip_grad_norm(parameters, max_norm):
    """`torch.nn.utils.clip_grad_norm_`, with the sum over the shards in float64, as in
    the notebook: the same to the last digit."""
    gradients = [each.grad.to_local() for each in parameters if each.grad is not None]
    square = nn.utils.get_total_norm(gradients).double().square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, square.sqrt().float())'''

MAIN = """\
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
seed_everything(args.seed)
step_losses = []"""

LOADER = """\
{bind}sampler = RankBatches(
    {dataset}, {batch_size}, shuffle={shuffle},
    accumulate=args.accumulate, seed=args.seed,
)
{loader} = DataLoader({dataset}, batch_sampler=sampler)
seed_everything(args.seed + rank)  # from here on, for dropout, each rank its own"""

WRAP = {
    "ddp": """\
{model} = DistributedDataParallel({model}.to(device), gradient_as_bucket_view=True)""",
    "fsdp": """\
{model}.to(device)
for tensor in [*{model}.parameters(), *{model}.buffers()]:
    dist.broadcast(tensor.detach(), src=0)
shard({model})
fully_shard({model})  # what is in no block; then make the optimizer""",
    "zero": """\
num_parameters = sum(parameter.numel() for parameter in {model}.parameters())
largest = 50_000_000 if device.type == "cuda" else 2_000_000
bucket = min(largest, num_parameters // 8 + 1)
config = {{
    "train_micro_batch_size_per_gpu": 1,  # not used: the sampler decides
    "gradient_accumulation_steps": args.accumulate,
    "gradient_clipping": args.clip or 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {{
        "stage": {stage},
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": largest,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_max_live_parameters": bucket,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 1_000,
    }},
}}
{model}, {optimizer}, _, _ = deepspeed.initialize(
    model={model}, optimizer={optimizer}, config=config
)""",
}

BEGIN = {
    "ddp": """\
is_last = (len(step_losses) + 1) % args.accumulate == 0  # of its step
{model}.require_backward_grad_sync = is_last  # as no_sync() does""",
    "fsdp": """\
is_last = (len(step_losses) + 1) % args.accumulate == 0  # of its step
{model}.set_requires_gradient_sync(is_last)""",
    "zero": "",
}

WEIGHT = "weight = sampler.weight(len(step_losses))"

BACKWARD = {
    "ddp": "({loss} / args.accumulate).backward()",
    "fsdp": "({loss} / args.accumulate).backward()",
    "zero": "{model}.backward({loss})  # divides it by the number of microbatches",
}

RECORD = "step_losses.append(({loss}.detach(), {num_samples}))"

STEP = {
    "ddp": """\
if is_last:
    if args.clip is not None:
        torch.nn.utils.clip_grad_norm_({model}.parameters(), args.clip)
    {optimizer}.step()
    # Gradients of several microbatches are summed in DDP's buckets.
    {optimizer}.zero_grad(set_to_none=args.accumulate == 1)""",
    "fsdp": """\
if is_last:
    if args.clip is not None:
        clip_grad_norm(list({model}.parameters()), args.clip)
    {optimizer}.step()
    {optimizer}.zero_grad()""",
    "zero": """\
{model}.step()  # steps after the last microbatch; clips and clears gradients, too""",
}

END = """\
if args.losses:
    write_losses(args.losses, step_losses, args.accumulate, device)"""

LAUNCH = """\
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default={seed})
    parser.add_argument(
        "--accumulate",
        type=int,
        default={accumulate},
        help="compute each batch in this many microbatches",
    )
    parser.add_argument(
        "--clip",
        type=float,
        default={clip},
        help="clip the norm of the whole gradient to this",
    )
    parser.add_argument(
        "--losses", metavar="FILE", help="write the loss of each step as CSV"
    )
{more}    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # as in the notebook: more would change last digits
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    {main}(parser.parse_args())
    dist.destroy_process_group()"""

LOCAL_RANK = """\
    # DeepSpeed's launcher passes this one.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
"""
