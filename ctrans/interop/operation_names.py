"""The names of torch's functions by what they do with tensors."""

LERP = "lerp"
"""The sum (1 - w) x + w y of x, y and w."""
SUMS = ("add", "add_", "sub", "sub_", LERP)
VALUES_READ = {
    "to": 1,
    **dict.fromkeys(("type_as", "view_as", "reshape_as", "expand_as"), 1),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"), 0),
}
"""Of how many tensors, from the first, an operation reads the values; of others it reads the dtype
or the shape alone. Other operations read the values of all.
"""
RESHAPES = (
    "alias",  # x[:]
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
)
"""Operations that keep all numbers in their order."""
TURNS = ("transpose", "permute", "movedim", "mT", "T")
"""Operations that change the order of axes."""
MOVES = (*RESHAPES, *TURNS, "dropout")
"""Operations that change the order or the shape of axes."""
MASKS = ("masked_fill", "masked_fill_")
"""Operations that set entries to a number where a mask hides them."""
CONVERSIONS = ("to", "type_as", "float", "double", "half", "bfloat16")
"""Operations that change the dtype."""
PRODUCTS = ("mm", "matmul", "linear", "einsum", "tensordot", "conv", "attention")
"""Parts of the names of operations that multiply by matrices."""
NORM = "norm of tokens"
"""The name of a call of a norm module."""
DECISIONS = (
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__index__",
    "__float__",
    "__contains__",
    "equal",
    "allclose",
    "is_nonzero",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
)
"""Functions by whose values a model's code may decide what it does next, or how large tensors
are.
"""
