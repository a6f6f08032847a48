"""The header of a packed weight; needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PackedInfo:
    """The header of a packed weight."""

    bits: int  # bits of a code, 1 to 8
    mapping: str  # "symmetric", "affine" or "levels"
    group_size: int | None  # None: one group per row
    out_features: int  # rows, n
    in_features: int  # values of a row, k
    groups: int  # per row
    has_bias: bool  # inside the packed weight
    total_bytes: int  # with the header
    version: int  # version of the format: 4 with activations of 16 bits, else 3 with rotated inputs, else 2 with levels, else 1
    format: str = "panel16"  # format of the bytes after the header; or a vendor's
    levels: tuple[int, ...] | None = None  # the level of each code with mapping "levels"; for experts, the first expert's
    experts: int | None = None  # number of matrices, each described by the fields above; None: a single matrix
    rotated_inputs: int = 0  # block size of the rotation; 0: inputs are not rotated
    activation_bits: int = 8  # 8: inputs are rounded to int8; 16: to two int8 planes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: (out_features, in_features), with the number of experts first if there are any."""
        one = (self.out_features, self.in_features)
        return one if self.experts is None else (self.experts, *one)

    @property
    def bits_per_weight(self) -> float:
        """All stored bits (codes, scales, sums, bias, padding, header) divided by the number of weights."""
        return 8 * self.total_bytes / (self.out_features * self.in_features)


def describe_format(info: PackedInfo) -> str:
    """The format of a packed weight in words, for ``repr``."""
    group = "per channel" if info.group_size is None else info.group_size
    format = "" if info.format == "panel16" else f"format={info.format}, "
    rotated = f"inputs rotated in blocks of {info.rotated_inputs}, " if info.rotated_inputs else ""
    planes = "activation_bits=16, " if info.activation_bits == 16 else ""
    return (
        f"{format}bits={info.bits}, group_size={group}, mapping={info.mapping}, {rotated}{planes}"
        f"{info.bits_per_weight:.2f} bits per weight"
    )


def describe_features(info: PackedInfo, has_order: bool) -> str:
    """A packed linear layer in words.

    Args:
        has_order: whether it has an act-order permutation.
    """
    order = "act-order permutation, " if has_order else ""
    features = f"in_features={info.in_features}, out_features={info.out_features}, bias={info.has_bias}"
    return f"{features}, {order}{describe_format(info)}"
