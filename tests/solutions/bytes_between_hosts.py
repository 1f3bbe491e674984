from labkit.course import check


def bytes_between_hosts(num_hosts, ranks_per_host, model_bytes, strategy):
    # A ring over all ranks crosses each border once. Under hsdp a host's rings between
    # hosts have a shard each, together the whole model.
    num_ranks = num_hosts * ranks_per_host
    members, passes = {
        "ddp": (num_ranks, 2),
        "fsdp": (num_ranks, 3),
        "hsdp": (num_hosts, 2),
    }[strategy]
    if num_hosts == 1:
        return 0
    return passes * model_bytes * (members - 1) / members


check("bytes_between_hosts", bytes_between_hosts)
