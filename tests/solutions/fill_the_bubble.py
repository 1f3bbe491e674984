from labkit.course import check


def order(rank, num_ranks, num_microbatches):
    # As many forward passes ahead as there are stages behind; then one of each in turn.
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    passes = [("forward", number) for number in range(ahead)]
    for number in range(num_microbatches):
        if number + ahead < num_microbatches:
            passes.append(("forward", number + ahead))
        passes.append(("backward", number))
    return passes


check("fill_the_bubble", order)
