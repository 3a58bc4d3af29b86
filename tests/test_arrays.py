import numpy as np
import pytest
import standin

from hpcdp.arrays import array_namespace, from_host, is_host, to_host
from hpcdp.errors import ArrayMixError


def test_numpy_arrays_and_scalars_are_numpys():
    assert array_namespace(np.zeros(2), np.float32(1), 3.0) is np
    assert array_namespace(1, 2.5) is np


def test_a_stand_in_names_its_own_namespace():
    x = standin.asarray(np.arange(3.0))
    assert array_namespace(x, 2.0) is standin
    assert not is_host(x)
    np.testing.assert_array_equal(to_host(x), np.arange(3.0))


def test_mixing_namespaces_is_refused_by_name():
    with pytest.raises(ArrayMixError, match=r"expected only numpy arrays, got one of standin too"):
        array_namespace(np.zeros(2), standin.asarray(np.zeros(2)))


def test_what_is_no_array_is_refused():
    with pytest.raises(ArrayMixError, match="expected an array, got str"):
        array_namespace("x")


def test_host_arrays_pass_without_a_copy():
    x = np.arange(4)
    assert to_host(x) is x
    assert from_host(x, np.zeros(1)) is x


def test_from_host_moves_to_the_others_namespace():
    moved = from_host(np.arange(4.0), standin.asarray(np.zeros(1)))
    assert array_namespace(moved) is standin
    np.testing.assert_array_equal(to_host(moved), np.arange(4.0))
