from labkit.course import check


def swap(tensor, a, b):
    if rank not in (a, b):
        return tensor
    other = a + b - rank
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, other)
    dist.recv(received, other)
    sending.wait()
    return received


check("swap_two_ranks", swap)
