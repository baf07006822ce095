"""Solves the assignment problem: each row gets its own column, at the least total cost."""

from collections.abc import Sequence


def assign(costs: Sequence[Sequence[int]], size: int | None = None) -> dict[int, int]:
    """Row → column, for `size` rows (default: all), but at most as many as there are columns.

    The total cost is the least of all choices of rows and columns. Equal input gives equal output.
    Rows must have equal lengths, costs must not be negative.
    """
    rows = len(costs)
    columns = len(costs[0]) if rows else 0
    count = min(rows, columns, rows if size is None else max(size, 0))
    if count == 0:
        return {}
    kept = _worth_keeping(costs, columns)
    # Rows that are left out get spare columns of cost 0: these will be the most expensive rows.
    spare = [0] * (rows - count)
    table = [[*(row[column] + 1 for column in kept), *spare] for row in costs]
    return {row: kept[at] for row, at in _hungarian(table).items() if at < len(kept)}


def _worth_keeping(costs: Sequence[Sequence[int]], columns: int) -> list[int]:
    """The columns that are among the n cheapest of some row, for n rows.

    Other columns are not needed: the other rows cannot occupy all of a row's n cheapest columns.
    """
    rows = len(costs)
    kept: set[int] = set()
    for row in costs:
        kept.update(sorted(range(columns), key=row.__getitem__)[:rows])
    return sorted(kept)


def _hungarian(table: Sequence[Sequence[int]]) -> dict[int, int]:
    """Row → column of a table with no more rows than columns.

    Kuhn's method by shortest augmenting paths with potentials (Jonker and Volgenant): rows are
    added one at a time, and earlier rows move to other columns. Index 0 means "none".
    """
    rows, columns = len(table), len(table[0])
    of_row = [0] * (rows + 1)
    of_column = [0] * (columns + 1)
    row_at = [0] * (columns + 1)  # the row that has the column
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
                cost = least[other]
                if cost is None or reduced < cost:
                    least[other] = cost = reduced
                    came_from[other] = column
                if step is None or cost < step:
                    step, following = cost, other
            assert step is not None  # there are as many columns as rows
            for other in range(columns + 1):
                if seen[other]:
                    of_row[row_at[other]] += step
                    of_column[other] -= step
                elif (cost := least[other]) is not None:
                    least[other] = cost - step
            column = following
        while column:
            before = came_from[column]
            row_at[column] = row_at[before]
            column = before
    return {at - 1: column - 1 for column, at in enumerate(row_at) if column and at}
