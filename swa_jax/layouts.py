"""PagedRows: rows in the page-planar layout that other engines keep.

A page of FlashMLA, vLLM and sglang keeps the data bytes of all its tokens, then all their scales; a
ring keeps each token's scales behind its data. Both have the same size, so bytes do not tell in
which order they are. The type does: pages are PagedRows, in a format marked as page-planar, rings
are KVRows, and neither is taken for the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Int, Int32, UInt8

from pallas_kernels import V41, KVCacheFormat, checks
from pallas_kernels.formats import check_format
from pallas_kernels.serialization import register_serialization


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedRows:
    """One layer's rows in pages: the data of all tokens of a page, then the scales of all.

    Row i is token `i % tokens_per_page` of page `i // tokens_per_page`, as in the slot mappings of
    the engines. The value is immutable, as KVRows is.

    Attributes:
      pages: uint8[num_pages, page_bytes].
      tokens_per_page: tokens in a page; engines have 32, 64, 128 or 256.
      fmt: the rows' format, marked as page-planar (`token_interleaved` is False).
    """

    pages: UInt8[Array, "num_pages page_bytes"]
    tokens_per_page: int = dataclasses.field(metadata={"static": True})
    fmt: KVCacheFormat = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, num_pages: int, tokens_per_page: int, fmt: KVCacheFormat = V41) -> "PagedRows":
        """Pages of zeros.

        Args:
          num_pages: number of pages.
          tokens_per_page: tokens in each.
          fmt: the format of a row, such as V41.

        Raises:
          ValueError: a size below 1, a format without pages, or more rows than an int32 names.
        """
        size = page_bytes(tokens_per_page, fmt)
        checks.check_count("num_pages", num_pages)
        _check_num_rows("paged", num_pages * tokens_per_page)  # before they are allocated
        pages = jnp.zeros((num_pages, size), jnp.uint8)
        return cls.view(pages, tokens_per_page=tokens_per_page, fmt=fmt)

    @classmethod
    def view(
        cls,
        pages: UInt8[Array, "num_pages page_bytes"],
        *,
        tokens_per_page: int,
        fmt: KVCacheFormat = V41,
    ) -> "PagedRows":
        """The pages of an engine. Nothing is copied.

        Args:
          pages: uint8[num_pages, page_bytes], with the padding at each page's end. The engines'
            tensors [num_pages, tokens, 1, row_bytes] are views that leave it out, of such pages.
          tokens_per_page: tokens in each page.
          fmt: the format of a row, such as V41.

        Raises:
          ValueError: pages of another size or dtype, a format without pages, or more rows than an
            int32 names.
        """
        page_bytes(tokens_per_page, fmt)  # refuses a format without pages
        paged = cls(pages, tokens_per_page, dataclasses.replace(fmt, token_interleaved=False))
        check_paged(paged)
        return paged

    @property
    def num_rows(self) -> int:
        """Rows in all pages."""
        return self.pages.shape[0] * self.tokens_per_page

    @property
    def row_format(self) -> KVCacheFormat:
        """The format of a row outside its page."""
        return dataclasses.replace(self.fmt, token_interleaved=True)


def page_bytes(tokens_per_page: int, fmt: KVCacheFormat) -> int:
    """Bytes from one page to the next.

    Args:
      tokens_per_page: tokens in a page, 1 or more.
      fmt: the format of a row.

    Returns:
      The bytes of the rows, padded to a multiple of 512 or of a row's data bytes, whichever is
      larger: 512 for V41 and V41_FP4 and 576 for V4, as FlashMLA pads; BF16 and F32 need none.

    Raises:
      ValueError: a number below 1, a page above 2 GiB, or a format without pages, as V32 is.
    """
    check_format(fmt)
    if not fmt.scales_last:
        raise ValueError(
            f"fmt: expected a format whose scales follow all its data, got {fmt.name}, which the "
            f"engines keep token-interleaved in their pages too"
        )
    checks.check_count("tokens_per_page", tokens_per_page)
    unit = max(512, fmt.data_bytes)
    size = -(-tokens_per_page * fmt.row_bytes // unit) * unit
    if size > checks.INT32_MAX:
        raise ValueError(
            f"tokens_per_page: expected pages of at most {checks.INT32_MAX} bytes, the limit of an "
            f"int32 offset, got {size}"
        )
    return size


def check_paged(paged: PagedRows) -> None:
    """Raises ValueError unless `paged` is a PagedRows whose sizes agree."""
    checks.check_type("paged", paged, PagedRows)
    dtype = getattr(paged.pages, "dtype", type(paged.pages).__name__)
    shape = np.shape(paged.pages)
    size = page_bytes(paged.tokens_per_page, paged.row_format)
    if dtype != jnp.uint8 or len(shape) != 2 or shape[1] != size:
        raise ValueError(
            f"pages: expected uint8[num_pages, {size}] for {paged.tokens_per_page} tokens of "
            f"{paged.fmt.name} in a page, got {dtype}{shape}"
        )
    _check_num_rows("paged", paged.num_rows)


def load_paged(paged: PagedRows, slots: Int[ArrayLike, "*n"]) -> UInt8[Array, "*n row_bytes"]:
    """The bytes of rows in pages, each row's scales behind its data as in a ring.

    Args:
      paged: the pages.
      slots: integers of any shape, page * tokens_per_page + token; -1 or a slot outside the pages
        means none.

    Returns:
      uint8[..., row_bytes]; zeros where the slot means none.

    Raises:
      ValueError: `paged` is no PagedRows, or the slots are not integers.
    """
    check_paged(paged)
    slots = checks.as_int32("slots", slots)
    valid = is_valid_slot(paged, slots)
    page, token = jnp.divmod(jnp.where(valid, slots, 0).reshape(-1), paged.tokens_per_page)

    def part(size, start):
        # Page and byte are two coordinates, so no address is computed in 32 bits.
        return jax.vmap(lambda at: lax.dynamic_slice(paged.pages, at, (1, size))[0])((page, start))

    data = jnp.concatenate([part(*where) for where in _parts(paged, token)], axis=-1)
    data = data.reshape(*slots.shape, paged.fmt.row_bytes)
    return jnp.where(valid[..., None], data, jnp.uint8(0))


def store_paged(
    paged: PagedRows, data: UInt8[Array, "*n row_bytes"], slots: Int[ArrayLike, "*n"]
) -> PagedRows:
    """Pages with new bytes in some slots.

    Args:
      paged: the pages.
      data: uint8[..., row_bytes], rows as a ring keeps them.
      slots: integers, the slot of each; -1 or a slot outside the pages skips that one. A slot may
        come twice with the same bytes, as where requests share a page.

    Returns:
      The new pages; every other byte is the same, padding too.

    Raises:
      ValueError: `paged` is no PagedRows, or a wrong shape or dtype.
    """
    check_paged(paged)
    slots = checks.as_int32("slots", slots)
    checks.check_bytes("data", data)
    checks.check_shape("data", data, (*slots.shape, paged.fmt.row_bytes))
    slots, data = slots.reshape(-1), data.reshape(-1, paged.fmt.row_bytes)
    # A slot outside gives a page outside, negative ones too, and those the scatter drops.
    page, token = jnp.divmod(slots, paged.tokens_per_page)
    pages, column = paged.pages, 0
    for size, start in _parts(paged, token):
        pages = lax.scatter(
            pages,
            jnp.stack([page, start], axis=-1),
            data[:, column : column + size],
            lax.ScatterDimensionNumbers(
                update_window_dims=(1,),
                inserted_window_dims=(0,),
                scatter_dims_to_operand_dims=(0, 1),
            ),
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )
        column += size
    return dataclasses.replace(paged, pages=pages)


def _parts(paged: PagedRows, token: Int32[Array, " n"]) -> list[tuple[int, Int32[Array, " n"]]]:
    """Size and first byte in the page of a token's data, and of its scales with their pad."""
    data = paged.fmt.data_bytes
    scales = paged.fmt.row_bytes - data
    return [(data, token * data), (scales, paged.tokens_per_page * data + token * scales)]


def is_valid_slot(paged: PagedRows, slots: Int32[Array, "*n"]) -> Bool[Array, "*n"]:
    """True where a slot names a row."""
    return (slots >= 0) & (slots < paged.num_rows)


def _check_num_rows(name: str, num_rows: int) -> None:
    if num_rows > checks.INT32_MAX:
        raise ValueError(
            f"{name}: expected at most {checks.INT32_MAX} rows, the limit of an int32 slot, got "
            f"{num_rows}"
        )
