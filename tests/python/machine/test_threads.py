"""The same bits for any number of threads, and for calls from several threads at once."""

from concurrent.futures import ThreadPoolExecutor

import lowbit
import pytest
import torch
from reference import MAPPINGS, WIDTHS, assert_same_bits, random_packed, random_rows


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_any_number_of_threads(bits, mapping):
    n, k = 600, 512  # large enough for several threads even at one row
    packed = random_packed(n, k, bits, 64, mapping, bias=True)
    indices = torch.arange(2000) % n
    for m in (1, 5, 70):
        x = random_rows(m, k)
        torch.set_num_threads(1)
        expected, table = lowbit.linear(x, packed, n), lowbit.embedding(indices, packed, k)
        strided = lowbit.linear(x.t().contiguous().t(), packed, n)
        assert_same_bits(strided, expected)
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            assert torch.get_num_threads() == threads
            assert_same_bits(lowbit.linear(x, packed, n), expected)
            assert_same_bits(lowbit.linear(x.t().contiguous().t(), packed, n), expected)
            assert_same_bits(lowbit.embedding(indices, packed, k), table)


def test_rows_do_not_depend_on_their_number():
    packed = random_packed(200, 256, 4, 32, "symmetric", bias=True)
    x = random_rows(50, 256)
    expected = torch.cat([lowbit.linear(row, packed, 200) for row in x.split(1)])
    for m in (2, 3, 4, 7, 8, 16, 50):
        assert_same_bits(torch.cat([lowbit.linear(rows, packed, 200) for rows in x.split(m)]), expected)


@pytest.mark.parametrize("inner_threads", [1, 2])
def test_concurrent_calls(inner_threads):
    torch.set_num_threads(inner_threads)
    tasks = []
    for i in range(24):
        n, k, bits = 40 + 97 * (i % 5), 64 + 160 * (i % 4), 1 + i % 8
        packed = random_packed(n, k, bits, 32, MAPPINGS[i % 2], seed=i)
        tasks.append((random_rows(1 + 7 * (i % 6), k, seed=i), packed, n))
    expected = [lowbit.linear(*task) for task in tasks]

    def work(start: int) -> list[tuple[int, torch.Tensor]]:
        order = [(start + i) % len(tasks) for i in range(5 * len(tasks))]
        return [(i, lowbit.linear(*tasks[i])) for i in order]

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(0, 24, 6)):
            for i, result in results:
                assert_same_bits(result, expected[i])


def test_concurrent_errors_and_successes():
    packed = random_packed(40, 64, 4, 32, "symmetric")
    altered = packed.clone()
    altered[20] ^= 1
    x = random_rows(3, 64)
    expected = lowbit.linear(x, packed, 40)

    def work(bad: bool) -> None:
        for _ in range(200):
            if bad:
                with pytest.raises(ValueError, match="altered header"):
                    lowbit.linear(x, altered, 40)
                with pytest.raises(IndexError, match="index 40 "):
                    lowbit.embedding(torch.tensor([0, 40]), packed, 64)
            else:
                assert_same_bits(lowbit.linear(x, packed, 40), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [True, False, True, False]))
