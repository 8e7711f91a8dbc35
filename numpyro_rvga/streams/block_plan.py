"""How many rows are solved for together: what "auto" stands for, by the model and the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..engines.devices import Devices
from ..engines.engine import Engine
from ..engines.sparse import SparseEngine, sparse_engine
from ..model.data.row_set import num_distinct
from ..model.data.rows import Rows, num_rows
from ..options import Options, checked_size
from .source import RowSource

RECURSIONS = ("explicit", "ekf", "qkf")  # which solve nothing
FIRST_BLOCK_ROWS = 2000
FIRST_BLOCK_ROWS_PER_PARAMETER = 40
FIRST_BLOCK_NUMBERS = 2**26  # in the Jacobians of the first block
JOINT_ROWS_PER_PARAMETER = 400  # of a solve with kept rows
MEMORY_ROWS_PER_PARAMETER = 2000
MEMORY_NUMBERS = 2**25  # in the Jacobians of the kept rows
CHUNK_NUMBERS = 2**22
MAX_CHUNK = 8192
DEFAULT_BLOCK = 1024
DEFAULT_BLOCK_LINEARIZED = 256  # where predictors are not affine


class Sizes(NamedTuple):
    """:ivar first: rows of the first, joint solve. :ivar block: of an update. :ivar chunk: of a compiled step.
    :ivar memory: rows kept at most. :ivar joint: those of them in one solve. :ivar keeps_rows: whether to keep any."""

    first: int
    block: int
    chunk: int
    memory: int
    joint: int
    keeps_rows: bool


@dataclass(frozen=True)
class BlockPlan:
    """The sizes that a user asks for; see :class:`RVGA`.

    :ivar is_moving: whether parameters move between blocks.
    """

    options: Options
    block_size: int | str
    first_block: int | str
    memory: int | str
    is_moving: bool

    def __post_init__(self) -> None:
        """:raises ValueError: for sizes that do not exist, or that the scheme does not have."""
        for name, least in (("block_size", 1), ("first_block", 0), ("memory", 0)):
            object.__setattr__(self, name, checked_size(name, getattr(self, name), least))
        scheme = self.options.scheme
        if scheme != "implicit" and (self.block_size not in ("auto", 1) or self.keeps_or_begins):
            raise ValueError(f"scheme={scheme!r} fixes its blocks: leave block_size, first_block and memory at 'auto'.")

    @property
    def keeps_or_begins(self) -> bool:
        """Whether a first block or a memory is asked for."""
        return bool({self.first_block, self.memory} - {"auto", 0})

    @property
    def joint_rows(self) -> int:
        """How many rows a model is read for that are all in one solve."""
        plain = not self.is_moving and {self.block_size, self.first_block} == {"auto"}
        return FIRST_BLOCK_ROWS if plain else 0

    @property
    def may_be_joint(self) -> bool:
        """Whether the options leave it to the model how many rows are solved for together."""
        is_auto = {self.block_size, self.first_block, self.memory} == {"auto"}
        return self.options.scheme in ("implicit", "laplace") and not self.is_moving and is_auto

    @property
    def _chooses(self) -> bool:
        return self.may_be_joint and self.options.scheme == "implicit"

    def check_shared(self, devices: Devices) -> None:
        """:raises ValueError: for blocks of which not every device has as many rows."""
        one_by_one = self.options.scheme in RECURSIONS or self.is_moving
        block = 1 if one_by_one and self.block_size == "auto" else self.block_size
        if isinstance(block, int) and block % devices.count:
            raise ValueError(
                f"{devices.count} devices cannot share blocks of {block} rows: take a block_size that is a multiple of "
                f"{devices.count}, or leave mesh out."
            )

    def sizes(self, engine: Engine, source: RowSource, most_rows: int) -> Sizes:
        """The sizes in numbers, in place of ``"auto"``.

        :param most_rows: of a step.
        :raises ValueError: for rows that are not in memory, if they are wanted all at once.
        """
        scheme, per_row, size = self.options.scheme, engine.numbers_per_row, engine.program.layout.size
        plain = self.block_size != "auto" or scheme != "implicit" or engine.is_moving
        default = engine.devices.rounded_up(DEFAULT_BLOCK if engine.is_affine else DEFAULT_BLOCK_LINEARIZED)
        block = self.block_size if isinstance(self.block_size, int) else 1 if plain else default
        if isinstance(self.memory, int):
            memory = self.memory
        else:
            useful = not plain and engine.is_affine
            memory = min(MEMORY_ROWS_PER_PARAMETER * size, MEMORY_NUMBERS // per_row) if useful else 0
        joint = min(JOINT_ROWS_PER_PARAMETER * size, memory)
        if scheme == "laplace":
            if source.total is None:
                raise ValueError("scheme='laplace' needs all rows in memory at once.")
            first = source.total
        elif isinstance(self.first_block, int):
            first = self.first_block
        else:
            first = 0 if plain else max(FIRST_BLOCK_ROWS, FIRST_BLOCK_ROWS_PER_PARAMETER * size, joint)
            most = max(FIRST_BLOCK_NUMBERS // per_row, 1)
            # Of twice as many, half would be kept in the end.
            first = min(first if plain or source.is_longer_than(2 * first) else 2 * first, most)
        chunk = min(MAX_CHUNK, most_rows, max(CHUNK_NUMBERS // per_row, 1))
        if source.total is not None:  # pieces of equal length: none is mostly padding
            rest = max(source.total - first, 1)
            chunk = -(-rest // -(-rest // chunk))
        keeps_rows = memory > 0 and source.is_longer_than(first)
        return Sizes(first, block, max(1, -(-chunk // block)) * block, memory, joint, keeps_rows)

    def sizes_in_memory(self, engine: Engine, rows: Rows, sizes: Sizes) -> tuple[Sizes, SparseEngine | None]:
        """The sizes of one solve of all rows, which are at hand, if it may take them; and its engine, if each row
        depends on few entries of theta."""
        total = num_rows(rows)
        if self._chooses and total <= 2 * JOINT_ROWS_PER_PARAMETER * engine.program.layout.size:
            sparse = sparse_engine(engine, rows)
            if sparse is not None:
                return sizes._replace(first=total, keeps_rows=False), sparse
        distinct = num_distinct(rows, sizes.first) if self._chooses and sizes.first else total
        if self._takes_all(engine, distinct, sizes.first):
            sizes = sizes._replace(first=max(total, sizes.first), keeps_rows=False)
        return sizes, None

    def _takes_all(self, engine: Engine, distinct: int, first: int) -> bool:
        """Whether one solve takes all rows, so many of them distinct. ``first``: so many are always in one."""
        if distinct <= first:
            return True
        if not self._chooses or distinct * engine.numbers_per_row > FIRST_BLOCK_NUMBERS:
            return False
        if engine.effort.is_sampled:
            return engine.effort.takes_few_points(distinct)
        most = 2 * MEMORY_ROWS_PER_PARAMETER * engine.program.layout.size  # so many make predictors narrow
        return engine.is_affine and engine.effort.rows_can_do_with_few and distinct <= most
