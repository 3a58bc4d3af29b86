"""Products in either order are the same product."""

import numpy as np
import pytest
import standin

from hpcdp.arrays import to_host
from hpcdp.nn.products import times_transposed


@pytest.mark.parametrize("rows", [0, 1, 2, 64, 65])
@pytest.mark.parametrize(("others", "columns"), [(5, 127), (5, 128), (300, 130)])
@pytest.mark.parametrize("asarray", [np.asarray, standin.asarray])
def test_a_product_with_a_transposed_matrix(rows, others, columns, asarray):
    rng = np.random.default_rng(rows)
    g, w = rng.standard_normal((rows, columns)), rng.standard_normal((others, columns))
    out = asarray(np.full((rows, others), np.nan))
    times_transposed(asarray(g), asarray(w), out)
    np.testing.assert_allclose(to_host(out), g @ w.T, rtol=1e-12, atol=1e-12)
