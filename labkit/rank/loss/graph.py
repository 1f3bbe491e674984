"""The means and sums that a loss is made of, found in its autograd graph."""

from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from enum import Enum
from math import prod
from typing import Any

import torch

from labkit.compat.c10d import MADE_WHOLE
from labkit.compat.torch import outputs_of
from labkit.compat.torch import saved_number
from labkit.compat.torch import saved_value

MAX_NODES = 4096
"""Of a graph, from the loss down to its means and sums, that are looked at: few, but
where a loop adds up the losses of its samples."""
MAX_NODES_BELOW = 128
"""That are looked at to know whether a mean or sum is over data or parameters."""
MAX_NODES_BESIDE = 48
"""Below a mean over samples, that are looked at for statistics of the batch."""
MAX_NODES_OF_LOOK = 1024
"""Of all such searches in one look at a loss."""

OFFSETS = ("Add", "Sub", "Rsub")
ADDED = (*OFFSETS, "Stack", "Cat")
"""Operations that are linear in all their inputs."""
PASSED = (
    "Neg",
    "Squeeze",
    "Unsqueeze",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Permute",
    "Transpose",
    "T",
    "Expand",
    "ToCopy",
    "Clone",
    "Alias",
    "Pre",  # DeepSpeed's PreBackwardFunctionForModule, on what a module returns
    "Averaged",  # of a sum that ranks have in parts: see `patch_dtensor`
    *MADE_WHOLE,
)
"""Operations that leave it as it is."""
CURVED = (
    "Sqrt",
    "Rsqrt",
    "Reciprocal",
    "Log",
    "Log1P",
    "Log2",
    "Log10",
    "Exp",
    "Expm1",
    "Pow",
    "Tanh",
    "Sigmoid",
    "Softplus",
    "LogSigmoid",
)
"""Functions of one number: that of a mean is not the mean of the functions."""
BENT = ("Abs", "Relu", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum")
"""Functions that leave alone the numbers on one side."""
ELEMENTWISE = (*ADDED, *PASSED, *CURVED, *BENT, "Mul", "Div")
"""What a statistic may go through before samples are compared with it."""
EXTREMES = ("Max", "Min", "Median", "Amax", "Amin")
STATISTICS = (
    *EXTREMES,
    "Std",
    "StdMean",
    "Var",
    "VarMean",
    "Norm",
    "LinalgVectorNorm",
    "Logsumexp",
    "Prod",
)
"""What makes one number of many, and is no mean or sum."""
DOTS = ("Dot", "Vdot", "Mm", "Mv", "Bmm", "Trace")
"""Of vectors they are the sum of the products of their elements."""
MOVED = (
    *PASSED,
    "Gather",
    "Index",
    "IndexSelect",
    "MaskedFill",
    "MaskedSelect",
    "NanToNum",
    "Select",
    "Slice",
    "Split",
    "SplitWithSizes",
    "Unbind",
    "Flip",
    "Roll",
    "Repeat",
)
"""Operations that leave each number as it is, or leave it out."""
LINEAR = (*ADDED, *MOVED, *DOTS, "Mul", "Div", "Mean", "Sum", "Cumsum", "Where")
"""Below which a division divides what is above, as well."""
MIXED = (*DOTS, "Mean", "Sum", "Cumsum")
"""Those that may make one number of those of several samples."""
PLACED = ("Cumsum", "Select", "Slice")
"""Those for which it matters where along a dimension a number is."""
SCALED = ("Abs", "Relu", "LeakyRelu", "Maximum", "Minimum")
"""Below which it does so too, where nothing is added to what it divides."""
SQUARES = ("Mm", "Bmm", "Cdist", "EuclideanDist", "Pdist")
"""What gives a number for each pair of rows of two matrices, or of one."""
SORTED = ("Topk", "Sort")
"""What orders numbers by their size."""
TAKEN = ("Index", "IndexSelect", "Gather")
"""What takes numbers by their places, as `argsort` gives them."""
ORDERED = (*SORTED, *TAKEN)
BROADCAST = (*OFFSETS, "Mul", "Div")
"""What does so, of inputs spread to one shape."""
PROBABILITIES = ("Softmax", "Sigmoid")
LAYERS = (
    "Addmm",
    "Linear",
    "Convolution",
    "Embedding",
    "EmbeddingBag",
    "Index",
    "NativeLayerNorm",
    "NativeBatchNorm",
    "NativeGroupNorm",
    "Relu",
    "Gelu",
    "Silu",
    "NllLoss",
    "NllLoss2D",
)
"""What has to do with data, and is not seen in penalties on parameters."""

Value = float | torch.Tensor
Operation = tuple[Any, int, str]
"""A node of the graph, which of its outputs it is reached by, and its kind."""


@dataclass(frozen=True)
class Factor:
    """What a sum is divided by."""

    value: Value | None
    """None where the graph does not say it."""
    is_number: bool = False
    """Whether it is a number of Python's, which the graph does not compute."""
    is_product: bool = False
    """Whether it is the inverse of what the sum is multiplied by."""


@dataclass(frozen=True)
class Term:
    """A mean or sum of many numbers, one of those that a loss is made of."""

    node: Any
    kind: str
    """ "mean", "sum", or "other" for a statistic."""
    sizes: tuple[int, ...] | None = None
    """The shape of what it is over; None where the graph does not say it."""
    count: Value | None = None
    """What a mean divides by."""
    factors: tuple[Factor, ...] = ()
    is_weighted: bool = False
    """Whether classes count differently."""
    is_partial: bool = False
    """Whether it may be over a part of the elements."""
    curve: Any = None
    """The operation that makes the loss a function of it that is not linear."""

    @property
    def divisor(self) -> Value | None:
        """The product of its factors; None where the graph does not say it."""
        values = [each.value for each in self.factors]
        known = [value for value in values if value is not None]
        return prod(known, start=1.0) if len(known) == len(values) else None


class Below(Enum):
    """What a division between a sum and the numbers that it is of comes to."""

    DIVIDES = "it divides the sum"
    SCALES = "it divides the sum, but for what is added to the numbers"
    CURVES = "something else"


class Terms:
    """What a loss is made of: found in its graph, from the loss down."""

    def __init__(self, num_samples: int | None) -> None:
        self._num_samples = num_samples
        self._left = MAX_NODES
        self._left_below = MAX_NODES_OF_LOOK
        self._is_of_data: dict[Any, bool | None] = {}
        self._near: dict[Any, list[Operation]] = {}

    def below(
        self, root: Any, factors: tuple[Factor, ...] = (), curve: Any = None
    ) -> Iterator[Term]:
        """The means and sums of a loss; those of parameters, too."""
        waiting = [(root, 0, factors, curve)]
        while waiting and self._left:
            self._left -= 1
            node, output, factors, curve = waiting.pop()
            if node is None:
                continue
            kind = kind_of(node)
            term = self._term(node, kind)
            if term is not None and self._is_of_one(term):
                waiting.append((*node.next_functions[0], factors, curve))
                continue
            if term is not None:
                found = replace(term, factors=term.factors + factors, curve=curve)
                yield from self._within(found) or [found]
                continue
            if kind in DOTS:
                sizes = _sizes_of_dot(node, output)
                if sizes and self._has_samples(sizes):
                    yield Term(node, "sum", sizes, factors=factors, curve=curve)
                elif sizes:
                    by = (Factor(None), *factors)
                    waiting += [(*each, by, curve) for each in node.next_functions]
                continue
            shape = _shape(node, output)
            if self._has_samples(shape) and kind not in ("Stack", "Cat"):
                continue
            inputs = node.next_functions
            if kind in ("Mean", "Sum"):
                # Of each row, as of a class, in what has no samples.
                given, of = prod(_shape(*inputs[0]) or (1,)), prod(shape or (1,))
                if given % (self._num_samples or 1):
                    by = (Factor(given / of, is_number=True),) if kind == "Mean" else ()
                    waiting.append((*inputs[0], by + factors, curve))
            elif kind in ADDED or kind in PASSED:
                waiting += [(*each, factors, curve) for each in reversed(inputs)]
            elif kind in ("Mul", "Div"):
                waiting += self._factored(node, kind, factors, curve)
            elif kind in CURVED or (kind in BENT and _is_bent(node, kind)):
                waiting += [(*each, factors, curve or node) for each in inputs]
            elif kind in BENT:
                waiting += [(*each, factors, curve) for each in inputs]

    def has_curved(self, terms: list[Term]) -> bool:
        """Whether a loss is no linear function of means over the samples."""
        number = self._num_samples or 0
        curved = [term for term in terms if term.curve is not None]
        curved += [
            replace(term, curve=term.node)
            for term in terms
            if term.kind == "other" and term.curve is None
        ]
        # As many as samples: of each sample one.
        if curved and len({term.curve for term in curved}) % number:
            return any(self._is_over_batch(term) for term in curved)
        if len(terms) > MAX_NODES_BESIDE:
            return False
        beside = [each for term in terms for each in self._beside(term)]
        return bool(beside) and bool(len(beside) % number)

    def near(self, terms: list[Term]) -> list[Operation]:
        """The operations right below terms, unless there are many of those."""
        if len(terms) > MAX_NODES_BESIDE:
            return []
        return [each for term in terms for each in self._operations_of(term.node)]

    def _operations_of(self, root: Any) -> list[Operation]:
        """It, and the operations right below it."""
        if root not in self._near:
            found = self._near[root] = []
            waiting: list[tuple[Any, int]] = [(root, 0)]
            seen: set[Any] = set()
            while waiting and len(seen) < MAX_NODES_BESIDE:
                node, output = waiting.pop(0)
                if node is None or node in seen:
                    continue
                seen.add(node)
                found.append((node, output, kind_of(node)))
                waiting += node.next_functions
        return self._near[root]

    def weights_of_samples(self, near: list[Operation]) -> list[torch.Tensor]:
        """Numbers of the loop's, one or some a sample, that these operations multiply
        by."""
        found: list[torch.Tensor] = []
        for node in nodes_of(near, "Mul"):
            inputs = [each for each, _ in node.next_functions]
            if None in inputs:
                given = saved_value(node, "self" if inputs[0] is None else "other")
                if isinstance(given, torch.Tensor) and (
                    self._num_samples in (given.numel(), *given.shape[:1])
                    and given.is_floating_point()
                ):
                    found.append(given.detach().double())
        return found

    def weighs_by_counts(self, near: list[Operation]) -> bool:
        """Whether positive targets count by how many negative ones there are."""
        found = nodes_of(near, "BinaryCrossEntropyWithLogits")
        return any(map(_is_by_counts, found))

    def has_pairs(self, near: list[Operation]) -> bool:
        """Whether samples are compared with others of this rank."""
        pairs = [e for e in near if e[2] in SQUARES and self._is_of_pairs(*e)]
        spread = [e for e in near if e[2] in BROADCAST and self._spreads(*e[:2])]
        # As many as samples: each within one sample.
        has_some = self._is_some([node for node, *_ in pairs]) or bool(spread)
        if not has_some and not self._matches(near):
            return False
        return not any(_is_gathered(node, output) for node, output, _ in near)

    def sorts_samples(self, near: list[Operation]) -> bool:
        """Whether samples are put in an order, as to take the hardest of this rank."""
        found = [
            node
            for node, _, kind in near
            if kind in ORDERED and self._is_sorted(node, kind)
        ]
        # As many as samples: each within one sample.
        return self._is_some(found) and not any(
            _is_gathered(node, output) for node, output, _ in near
        )

    def _matches(self, near: list[Operation]) -> bool:
        """Whether samples are matched with others by their places, as in triplets, or
        with their nearest ones. Not sent to experts, each once to each of them."""
        taken: dict[Any, list[torch.Tensor]] = {}
        for node, _, kind in near:
            if kind not in ("Index", "IndexSelect"):
                continue
            below, output = node.next_functions[0]
            rows, *others = _shape(below, output) or (0,)
            places = _places(node, kind, (rows, *others))
            is_of_samples = rows in self._sizes_of_pairs() and self.is_of_data(below)
            if places is not None and is_of_samples:
                taken.setdefault((below, output, rows), []).append(places)
        return any(
            len(one.unique()) < len(one)
            and (
                any(len(o) == len(one) and not torch.equal(o, one) for o in others)
                # In order they would be those of parts of each sample.
                or (len(one) == rows and bool((one.diff() < 0).any()))
            )
            for (_, _, rows), others in taken.items()
            for one in others
        )

    def _is_sorted(self, node: Any, kind: str) -> bool:
        [(below, output)] = node.next_functions[:1]
        sizes = _shape(below, output) or ()
        if kind in SORTED:
            dims = _reduced(saved_number(node, "dim"), len(sizes))
            is_along = dims == {0} or _are_of_samples(dims, sizes, self._num_samples)
        else:
            dims, is_along = {0}, _takes_some_in_order(node, kind, sizes)
        is_over = is_along and self._has_samples(tuple(sizes[at] for at in dims))
        return is_over and self.is_of_data(below) is True

    def weighted(self, root: Any) -> dict[Any, torch.Tensor]:
        """Products of mean probabilities over the samples with numbers, and these: the
        shares of the samples, where it balances the loads of experts."""
        products = nodes_of(self._operations_of(root), "Mul", *DOTS)
        found = {node: _numbers_of(node) for node in products}
        return {
            node: numbers
            for node, numbers in found.items()
            if numbers is not None and self._is_mean_of_probabilities(node)
        }

    def is_with(self, term: Term, nodes: Iterable[Any]) -> bool:
        """Whether a term is made of what these operations give, or the reverse."""
        below = [each for each, *_ in self._operations_of(term.node)]
        return any(
            node in below
            or term.node in [each for each, *_ in self._operations_of(node)]
            for node in nodes
        )

    def _is_mean_of_probabilities(self, node: Any) -> bool:
        """Whether it is so below an operation, but for what is linear."""
        waiting = [(each, False) for each, _ in node.next_functions]
        seen: set[Any] = set()
        while waiting and len(seen) < MAX_NODES_BESIDE:
            node, is_mean = waiting.pop()
            if node is None or (node, is_mean) in seen:
                continue
            seen.add((node, is_mean))
            kind = kind_of(node)
            term = self._term(node, kind)
            if kind in PROBABILITIES and is_mean:
                return True
            is_over_samples = term is not None and _begins_with(term, self._num_samples)
            if is_over_samples or kind in (*ADDED, *MOVED, "Mul", "Div"):
                is_mean = is_mean or is_over_samples
                waiting += [(each, is_mean) for each, _ in node.next_functions]
        return False

    def has_products(self, near: list[Operation]) -> bool:
        """Whether features are multiplied by each other and summed over the samples, as
        in a matrix of their covariances."""
        return self._is_some([*filter(self._is_product, nodes_of(near, "Mm", "Bmm"))])

    def _is_some(self, nodes: list[Any]) -> bool:
        return bool(len({*nodes}) % (self._num_samples or 1))

    def _is_product(self, node: Any) -> bool:
        # A product by einsum is one of a batch of one.
        left, right = (
            (1, 1, *(_shape(*each) or (0, 0)))[-3:] for each in node.next_functions
        )
        return (
            left[0] == right[0] == 1
            and left[-1] == right[-2] == self._num_samples
            and left[-2] != self._num_samples
            and all(self.is_of_data(each) for each, _ in node.next_functions)
        )

    def _is_of_pairs(self, node: Any, output: int, kind: str) -> bool:
        """Whether it is a square of numbers, of rows of two matrices of data, or half
        of one."""
        if kind == "Pdist":
            halves = [k * (k - 1) // 2 for k in self._sizes_of_pairs()]
            is_half = prod(_shape(node, output) or ()) in halves
            return is_half and self.is_of_data(node.next_functions[0][0]) is True
        if len(node.next_functions) < 2:
            return False
        *others, rows, columns = (1, 1, *(_shape(node, output) or ()))
        inputs = [each for each, _ in node.next_functions[:2]]
        return (
            rows == columns
            and rows in self._sizes_of_pairs()
            and prod(others) == 1
            and all(map(self.is_of_data, inputs))
        )

    def _spreads(self, node: Any, output: int) -> bool:
        """Whether it compares rows by broadcasting: (k, 1, ...) with (1, k, ...)."""
        shape = _shape(node, output) or ()
        rows = shape[0] if shape else 0
        if shape[:2] != (rows, rows) or rows not in self._sizes_of_pairs():
            return False
        found: dict[tuple[int, ...], Any] = {}
        waiting = [*node.next_functions]
        seen: set[Any] = set()
        while waiting and len(seen) < MAX_NODES_BESIDE:
            each = waiting.pop()
            if each[0] is None or each[0] in seen:
                continue
            seen.add(each[0])
            below = _shape(*each) or ()
            if below[:2] == (rows, rows):
                waiting += each[0].next_functions
            else:
                found[below] = each[0]
        parts = {(rows, 1, *shape[2:]), (1, rows, *shape[2:])}
        return set(found) == parts and all(map(self.is_of_data, found.values()))

    def _sizes_of_pairs(self) -> tuple[int, int]:
        """Twice as many where there are two views of each sample."""
        number = self._num_samples or 0
        return number, 2 * number

    def is_averaged(self, term: Term) -> bool:
        """Whether a sum is of means over the samples, and not over the samples: of one
        for each class or each step, as many as there may be."""
        waiting, seen = self._inputs(term.node, Below.DIVIDES), set()
        has_mean = False
        while waiting:
            node, below = waiting.pop()
            if node is None or (node, below) in seen:
                continue
            seen.add((node, below))
            if len(seen) > MAX_NODES_BESIDE:
                return False
            variable = getattr(node, "variable", None)
            inputs = self._inputs(node, below)
            is_divided = any(each is not Below.CURVES for _, each in inputs)
            is_layer = kind_of(node) in LAYERS and not is_divided
            if self._averages_samples(node, below):
                has_mean = True
            elif is_layer or not (
                variable is None or isinstance(variable, torch.nn.Parameter)
            ):
                return False
            else:
                waiting += inputs
        return has_mean

    def _inputs(self, node: Any, below: Below) -> list[tuple[Any, Below]]:
        """What an operation is of, and what a division comes to there."""
        kind, below = kind_of(node), self._below(node, below)
        inputs = [each for each, _ in node.next_functions]
        return [
            (each, Below.CURVES if at and kind == "Div" else below)
            for at, each in enumerate(inputs)
        ]

    def _below(self, node: Any, above: Below) -> Below:
        """What a division below an operation comes to."""
        kind = kind_of(node)
        if above is Below.CURVES:
            return above
        if kind in ("Mul", *DOTS) and self._num_of_data(node) > 1:
            return Below.CURVES  # as of a square, which is divided twice
        if kind in PLACED and self._counts_by_place(node, kind):
            return Below.CURVES
        if above is Below.SCALES:
            is_offset = kind in OFFSETS and self._num_of_data(node) < 2
            if is_offset or (kind in MIXED and not _is_within_samples(node, kind)):
                return Below.CURVES
        if kind == "Where" and self._num_of_data(node) > 1:
            return Below.SCALES
        if kind in LINEAR:
            return above
        return Below.SCALES if _is_scaled(node, kind) else Below.CURVES

    def _counts_by_place(self, node: Any, kind: str) -> bool:
        """Whether samples count by their places in the batch, as the first alone."""
        sizes = _shape(*node.next_functions[0]) or ()
        is_along = 0 in _reduced(saved_number(node, "dim"), len(sizes))
        is_whole = kind == "Slice" and (_shape(node, 0) or ())[:1] == sizes[:1]
        return is_along and self._has_samples(sizes[:1]) and not is_whole

    def _num_of_data(self, node: Any) -> int:
        """Inputs of an operation that may have to do with data."""
        inputs = [each for each, _ in node.next_functions if each is not None]
        return sum(self.is_of_data(each) is not False for each in inputs)

    def _averages_samples(self, node: Any, below: Below) -> bool:
        """Whether it is a mean over samples, or a division by their number: of the
        losses of samples, where it divides their sum, and not of scores."""
        number, kind = self._num_samples, kind_of(node)
        if number is None:
            return False
        if kind in ("Mul", "Div"):
            # By 1 or 0.5 it may be a weight.
            is_weight = number <= (2 if kind == "Mul" else 1)
            if below is Below.CURVES or is_weight:
                return False
            factor = self._factored(node, kind, (), None)
            values = [found[0].value for _, _, found, _ in factor if found]
            by = float(values[0] or 0) if len(values) == 1 else 0.0
            return abs(by - number) < 1e-4 * number
        term = self._term(node, kind)
        if term is not None:
            return term.kind == "mean" and self._has_samples(term.sizes)
        sizes = saved_number(node, "self_sym_sizes") if kind == "Mean" else None
        if not sizes:
            return False
        # Not over the first dimension, which may be that of a list.
        [(below, _)] = node.next_functions[:1]
        is_list = kind_of(below) == "Stack" and saved_number(below, "dim") == 0
        reduced = _reduced(saved_number(node, "dim"), len(sizes))
        over_samples = any(sizes[each] % number == 0 for each in reduced)
        return over_samples and (is_list or bool(sizes[0] % number))

    def is_of_data(self, node: Any) -> bool | None:
        """Whether what `node` computes has to do with data, or with parameters alone;
        None where that is not found."""
        if node not in self._is_of_data:
            self._is_of_data[node] = self._search(node)
        return self._is_of_data[node]

    def _search(self, node: Any) -> bool | None:
        waiting, seen = [(node, 0)], set()
        while waiting:
            node, output = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if len(seen) > MAX_NODES_BELOW or self._left_below <= 0:
                return None
            variable = getattr(node, "variable", None)
            if variable is not None:
                if isinstance(variable, torch.nn.Parameter):
                    continue
                if variable.ndim > 1 and self._has_samples(tuple(variable.shape)):
                    return True
                continue
            if kind_of(node) in LAYERS:
                return True
            self._left_below -= 1
            inputs = [each for each in node.next_functions if each[0] is not None]
            # A tensor without gradient that losses are written into is no data.
            is_written = kind_of(node).endswith("CopySlices")
            if len(inputs) < len(node.next_functions) and not is_written:
                # Not with a constant that is a number, or as large as a parameter.
                mine = prod(_shape(node, output) or ())
                if all(prod(_shape(*each) or ()) != mine for each in inputs):
                    return True
            waiting += inputs
        return False

    def _within(self, term: Term) -> list[Term]:
        """What a mean or sum is made of that is not over samples, but over classes or
        a list of losses."""
        [(node, output)] = term.node.next_functions[:1] or [(None, 0)]
        if kind_of(term.node) not in ("Mean", "Sum") or self._num_samples is None:
            return []
        shape = _shape(node, output)
        is_list = node is not None and kind_of(node) == "Stack"
        if not shape or (self._has_samples(shape) and not is_list):
            return []
        by = (Factor(term.count, True),) if term.kind == "mean" else ()
        found = list(self.below(node, by + term.factors, term.curve))
        return found if all(self._is_term_of_batch(each) for each in found) else []

    def _is_of_one(self, term: Term) -> bool:
        """Whether it is the mean or sum of one number, which is that number."""
        is_plain = kind_of(term.node) in ("Mean", "Sum") and term.sizes is not None
        is_sample = self._num_samples in (None, 1) and term.sizes != ()
        return is_plain and prod(term.sizes or ()) == 1 and not is_sample

    def _is_term_of_batch(self, term: Term) -> bool:
        return (
            term.sizes is None or self._has_samples(term.sizes) or term.kind == "mean"
        )

    def _factored(
        self, node: Any, kind: str, factors: tuple[Factor, ...], curve: Any
    ) -> list[tuple[Any, int, tuple[Factor, ...], Any]]:
        """Where to continue at a product or quotient."""
        (one, other) = (*node.next_functions, (None, 0))[:2]
        if one[0] is None or other[0] is None:
            factor = _constant(node, is_second=other[0] is None)
            if kind == "Mul" and factor.value is not None:
                factor = replace(factor, value=1 / factor.value, is_product=True)
            if kind == "Div" and one[0] is None:
                return [(*other, factors, curve or node)]
            return [(*(one if other[0] is None else other), (factor, *factors), curve)]
        unknown = (Factor(None), *factors)
        by_one, by_other = self.is_of_data(one[0]), self.is_of_data(other[0])
        if by_one and by_other:
            return [(*each, unknown, curve or node) for each in (one, other)]
        if kind == "Div" and by_other:
            return [(*other, unknown, curve or node)]
        return [
            (*each, unknown, curve)
            for each, is_ours in ((one, by_one), (other, by_other and kind == "Mul"))
            if is_ours
        ]

    def _beside(self, term: Term) -> list[Any]:
        """Statistics of the batch that the numbers of the samples are made with. Not
        the largest, which is taken off so that exponentials do not overflow."""
        waiting = [each for each in term.node.next_functions if each[0] is not None]
        seen: set[Any] = set()
        found = []
        while waiting and len(seen) < MAX_NODES_BESIDE:
            node, output = waiting.pop(0)
            if node in seen:
                continue
            seen.add(node)
            shape = _shape(node, output)
            if self._has_samples(shape):
                waiting += [each for each in node.next_functions if each[0] is not None]
                continue
            kind = kind_of(node)
            if kind in EXTREMES:
                continue
            below = self._term(node, kind)
            if below is None:
                if kind in ELEMENTWISE:
                    waiting += [e for e in node.next_functions if e[0] is not None]
            elif self._is_over_batch(below) and _begins_with(below, self._num_samples):
                found.append(node)
        return found

    def _term(self, node: Any, kind: str) -> Term | None:
        """What an operation makes of many numbers; None where it does something
        else."""
        if kind in ("Mean", "Sum", *STATISTICS):
            return _reduction(node, kind, self._num_samples)
        return _loss_term(node, kind)

    def _is_over_batch(self, term: Term) -> bool:
        sizes = term.sizes
        if sizes is not None and prod(sizes) < 2:
            return False
        return self.is_of_data(term.node) is True

    def _has_samples(self, shape: tuple[int, ...] | None) -> bool:
        """Whether something of this shape may hold a number for each sample."""
        if not shape or prod(shape) < 2:
            return False
        return not self._num_samples or prod(shape) % self._num_samples == 0


def kind_of(node: Any) -> str:
    """The name of an operation: "Mul" of "MulBackward0"."""
    return str(node.name()).partition("Backward")[0]


def nodes_of(operations: list[Operation], *kinds: str) -> list[Any]:
    """The nodes of those of these kinds."""
    return [node for node, _, kind in operations if kind in kinds]


def _is_scaled(node: Any, kind: str) -> bool:
    """Whether of divided numbers it gives the divided result, by any above 0."""
    if kind.startswith("Clamp"):
        found = saved_value(node, "min"), saved_value(node, "max")
        bounds = [each for each in found if each is not None]
        return bounds in ([0], [0.0])
    if kind in ("Norm", "LinalgVectorNorm"):
        return 1 in (saved_number(node, "ord"), saved_number(node, "p"))
    # Of two inputs none may be a constant.
    return kind in SCALED and all(each for each, _ in node.next_functions)


def _places(node: Any, kind: str, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """The places along the first dimension that it takes, a list of numbers."""
    given = saved_value(node, "indices" if kind == "Index" else "index")
    if kind == "Index":
        given = given[0] if given else None
    elif _reduced(saved_number(node, "dim"), len(sizes)) != {0}:
        return None
    is_list = isinstance(given, torch.Tensor) and given.dim() == 1
    return given if sizes and is_list and given.dtype != torch.bool else None


def _takes_some_in_order(node: Any, kind: str, sizes: tuple[int, ...]) -> bool:
    """Whether it takes some of the first dimension, each once, and in an order of its
    own: what a mask takes is in the order that it has."""
    given = _places(node, kind, sizes)
    if given is None:
        return False
    is_some = 1 < given.numel() < sizes[0] and len(given.unique()) == given.numel()
    return is_some and bool((given.diff() < 0).any())


def _numbers_of(node: Any) -> torch.Tensor | None:
    """What an operation multiplies by that has no gradient, if it is several."""
    if all(each for each, _ in node.next_functions):
        return None
    given = [saved_value(node, name) for name in ("self", "other", "vec", "tensor")]
    given = [each for each in given if isinstance(each, torch.Tensor)]
    return next((each for each in given if each.numel() > 1), None)


def _is_within_samples(node: Any, kind: str) -> bool:
    return kind in ("Mean", "Sum") and _reduction(node, kind) is None


def is_normalized(given: torch.Tensor) -> bool:
    """Whether numbers have mean 0 and standard deviation 1, and are no signs."""
    if abs(float(given.mean())) > 1e-4 or len(given.abs().unique()) == 1:
        return False
    # As in a group of answers to each question.
    if given.dim() > 1 and bool((given.flatten(1).mean(1).abs() < 1e-4).all()):
        return False
    return any(abs(float(given.std(correction=each)) - 1) < 1e-3 for each in (0, 1))


def adds_up_to(given: torch.Tensor, total: int, *, least: int = 2) -> bool:
    """Whether weights of so many sizes at least do."""
    is_so = abs(float(given.sum()) / total - 1) < 1e-5 and bool((given >= 0).all())
    return is_so and len(given.unique()) >= least


def _is_by_counts(node: Any) -> bool:
    weight, targets = (saved_value(node, name) for name in ("pos_weight", "target"))
    if not isinstance(weight, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return False
    dims = [0] if weight.numel() > 1 else list(range(targets.dim()))
    positive = targets.detach().double().sum(dims)
    negative = prod(targets.shape[dim] for dim in dims) - positive
    if weight.numel() not in (1, positive.numel()) or not bool((positive > 0).all()):
        return False
    ratio = (negative / positive).reshape(-1)
    is_ratio = torch.allclose(ratio, weight.detach().double().reshape(-1), rtol=1e-4)
    return is_ratio and bool((ratio != 1).any())


def _is_gathered(node: Any, output: int) -> bool:
    """Whether it brings together what several ranks have: by a collective, or beside
    what others have sent, which no gradient goes to."""
    name = str(node.name())
    if "gather" in name.lower():
        return name != "GatherBackward0"  # torch.gather's
    inputs = [each for each in node.next_functions if each[0] is not None]
    is_sent = kind_of(node) == "Cat" and len(inputs) < len(node.next_functions)
    if not is_sent and not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    rows, *rest = _shape(node, output) or (0,)
    given = [_shape(*each) or (0,) for each in inputs]
    return any(0 < each[0] < rows and [*each[1:]] == rest for each in given)


def _begins_with(term: Term, num_samples: int | None) -> bool:
    """Whether it is over something that has samples as its first dimension."""
    return bool(term.sizes and num_samples and term.sizes[0] % num_samples == 0)


def _loss_term(node: Any, kind: str) -> Term | None:
    """What a loss function of torch's makes of its numbers; None where it makes as many
    of them, and of what is none."""
    reduction = saved_number(node, "reduction")
    if reduction not in (1, 2):
        return None
    name = "mean" if reduction == 1 else "sum"
    target = saved_value(node, "target")
    sizes = None if target is None else tuple(target.shape) or (1,)
    if not kind.startswith("NllLoss"):
        count = prod(sizes) if sizes and reduction == 1 else None
        return Term(node, name, sizes, count)
    total = saved_value(node, "total_weight") if reduction == 1 else None
    if total is not None and sizes and total.dtype in (torch.float16, torch.bfloat16):
        # It is rounded, to infinity where it is large.
        whole = float(prod(sizes))
        total = whole if total == torch.tensor(whole).to(total.dtype) else total
    is_weighted = reduction == 1 and saved_value(node, "weight") is not None
    return Term(node, name, sizes, total, is_weighted=is_weighted, is_partial=True)


def _reduction(node: Any, kind: str, num_samples: int | None = None) -> Term | None:
    """A mean, sum or statistic over all elements, or over the dimension of samples:
    the first, or another where those that are left can have none."""
    sizes = saved_number(node, "self_sym_sizes")
    if sizes is None:
        inner = _shape(*node.next_functions[0])
        sizes = () if inner is None else inner
    sizes = tuple(sizes)
    if dims := _reduced(saved_number(node, "dim"), len(sizes)):
        if 0 not in dims and not _are_of_samples(dims, sizes, num_samples):
            return None
        sizes = tuple(size for at, size in enumerate(sizes) if at in dims)
    if kind == "Mean":
        return Term(node, "mean", sizes, prod(sizes))
    power = saved_number(node, "ord")
    power = saved_number(node, "p") if power is None else power
    return Term(node, "sum" if kind == "Sum" or power == 1 else "other", sizes)


def _are_of_samples(
    dims: set[int], sizes: tuple[int, ...], num_samples: int | None
) -> bool:
    """Whether these dimensions, none of which is the first, are those that samples are
    along, as in a matrix of classes and samples: where no others can be."""
    others = prod(size for at, size in enumerate(sizes) if at not in dims)
    is_left_out = bool(num_samples and others > 1 and others % num_samples)
    return is_left_out and not prod(sizes[at] for at in dims) % (num_samples or 1)


def _reduced(dim: Any, rank: int) -> set[int]:
    """The dimensions that an operation is over; none where it is over all."""
    if not rank:
        return set()  # torch takes dimension 0 of a single number, too
    dims = () if dim is None else dim if isinstance(dim, tuple) else (dim,)
    return {each - 2**64 + rank if each >= 2**63 else each % rank for each in dims}


def _sizes_of_dot(node: Any, output: int) -> tuple[int, ...] | None:
    """The shape of what a product of vectors or matrices sums up to one number; None
    where it gives more than one."""
    if prod(_shape(node, output) or ()) != 1:
        return None
    shapes = [_shape(*each) for each in node.next_functions]
    sizes = max((s for s in shapes if s is not None), key=prod, default=())
    if kind_of(node) == "Trace":
        sizes = sizes[:1]
    return tuple(size for size in sizes if size != 1) or None


def _is_bent(node: Any, kind: str) -> bool:
    """Whether a number is on the side where the function is not the identity."""
    given = saved_value(node, "result" if kind == "Relu" else "self")
    if not isinstance(given, torch.Tensor):
        return False
    if given.is_complex():
        return True
    least, most = 0.0, float("inf")
    if kind in ("Maximum", "Minimum"):
        other = saved_value(node, "other")
        if all(each for each, _ in node.next_functions):
            return True  # on another rank the other may be the greater one
        if node.next_functions[0][0] is None:
            given, other = other, given
        return bool((given < other if kind == "Maximum" else given > other).any())
    if kind.startswith("Clamp"):
        found = saved_value(node, "min"), saved_value(node, "max")
        if any(isinstance(each, torch.Tensor) for each in found):
            return False
        least = -float("inf") if found[0] is None else float(found[0])
        most = most if found[1] is None else float(found[1])
    if kind == "Relu":
        return bool((given <= 0).any())
    return bool(((given < least) | (given > most)).any())


def _shape(node: Any, output: int) -> tuple[int, ...] | None:
    """Of what an operation gave; None where it is not known."""
    if node is None:
        return None
    variable = getattr(node, "variable", None)
    if variable is not None:
        return _numbers(variable.shape)
    given = outputs_of(node)
    return _numbers(given[output].shape) if output < len(given) else None


def _numbers(shape: Any) -> tuple[int, ...]:
    """A shape without the one of a nested tensor that stands for many lengths, with
    which there is no arithmetic."""
    return tuple([each for each in shape if isinstance(each, int)])


def _constant(node: Any, *, is_second: bool) -> Factor:
    """The factor or divisor that no gradient goes to."""
    found = saved_value(node, "other" if is_second else "self")
    if not isinstance(found, torch.Tensor):
        return Factor(None if found is None else float(found) or None, is_number=True)
    if found.numel() != 1:
        return Factor(None)
    is_number = _is_number(found)
    return Factor(float(found) or None if is_number else found, is_number)


def _is_number(found: torch.Tensor) -> bool:
    """Whether a tensor stands for a number of Python's: it takes another's type."""
    if found.ndim or found.device.type != "cpu":
        return False
    is_int = not found.is_floating_point()
    other = torch.empty((), dtype=torch.int8 if is_int else torch.float16)
    return torch.result_type(other, found) == other.dtype
