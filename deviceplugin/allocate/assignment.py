"""The assignment problem: each row gets a column of its own, at the least sum of costs."""

from collections.abc import Sequence


def assign(costs: Sequence[Sequence[int]], size: int | None = None) -> dict[int, int]:
    """Row → column, for `size` of the rows (all of them, or as many as there are columns).

    Of all ways to choose that many rows and to give each its own column, it is one whose sum is
    least; the same one for the same input. Rows are of equal length, costs not negative.
    """
    rows = len(costs)
    columns = len(costs[0]) if rows else 0
    count = min(rows, columns, rows if size is None else max(size, 0))
    if count == 0:
        return {}
    kept = _worth_keeping(costs, columns)
    # A row that is left out takes a column of no cost, which no other has: the dearest ones do.
    spare = [0] * (rows - count)
    table = [[*(row[column] + 1 for column in kept), *spare] for row in costs]
    return {row: kept[at] for row, at in _hungarian(table).items() if at < len(kept)}


def _worth_keeping(costs: Sequence[Sequence[int]], columns: int) -> list[int]:
    """The columns that are among the cheapest of some row, as many of each as there are rows.

    Others are in no need: of a row's cheapest ones, the other rows cannot hold all.
    """
    rows = len(costs)
    kept: set[int] = set()
    for row in costs:
        kept.update(sorted(range(columns), key=row.__getitem__)[:rows])
    return sorted(kept)


def _hungarian(table: Sequence[Sequence[int]]) -> dict[int, int]:
    """Row → column of a table with no more rows than columns.

    Kuhn's method by shortest augmenting paths with potentials (Jonker and Volgenant): one row
    after the other is added, and those before it moved on. Index 0 stands for "none".
    """
    rows, columns = len(table), len(table[0])
    of_row = [0] * (rows + 1)
    of_column = [0] * (columns + 1)
    row_at = [0] * (columns + 1)  # which row has the column
    for row in range(1, rows + 1):
        row_at[0] = row
        column = 0
        least: list[int | None] = [None] * (columns + 1)
        came_from = [0] * (columns + 1)
        seen = [False] * (columns + 1)
        while row_at[column]:
            seen[column] = True
            at = row_at[column]
            prices = table[at - 1]
            base = of_row[at]
            step, following = None, 0
            for other in range(1, columns + 1):
                if seen[other]:
                    continue
                reduced = prices[other - 1] - base - of_column[other]
                known = least[other]
                if known is None or reduced < known:
                    least[other] = known = reduced
                    came_from[other] = column
                if step is None or known < step:
                    step, following = known, other
            assert step is not None  # there are as many columns as rows
            for other in range(columns + 1):
                if seen[other]:
                    of_row[row_at[other]] += step
                    of_column[other] -= step
                elif (known := least[other]) is not None:
                    least[other] = known - step
            column = following
        while column:
            before = came_from[column]
            row_at[column] = row_at[before]
            column = before
    return {at - 1: column - 1 for column, at in enumerate(row_at) if column and at}
