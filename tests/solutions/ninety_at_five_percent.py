from labkit.course import check


def average(gradient, memory):
    gradient = gradient + memory.get("rest", 0)
    places = gradient.abs().topk(len(gradient) // 200).indices.int()
    values = gradient[places]
    memory["rest"] = gradient.index_fill(0, places.long(), 0)
    all_places = [torch.empty_like(places) for _ in range(world_size)]
    all_values = [torch.empty_like(values) for _ in range(world_size)]
    dist.all_gather(all_places, places)
    dist.all_gather(all_values, values)
    mean = torch.zeros_like(gradient)
    for where, what in zip(all_places, all_values, strict=True):
        mean[where] += what / world_size
    return mean


check("ninety_at_five_percent", average)
