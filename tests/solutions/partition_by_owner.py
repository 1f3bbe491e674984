from labkit.course import check


def choose_owners(sizes, world_size):
    owners, loads = [0] * len(sizes), [0] * world_size
    for place in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


check("partition_by_owner", choose_owners)
