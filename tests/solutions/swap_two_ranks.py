from labkit.course import check


def swap(tensor, a, b):
    received = tensor.clone()
    if rank == a:
        dist.send(tensor, b)
        dist.recv(received, b)
    if rank == b:
        dist.recv(received, a)
        dist.send(tensor, a)
    return received


check("swap_two_ranks", swap)
