import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import standin
from raises import raises

from hpcdp.core.arrays import array_namespace, dtype_of, from_host, is_float, is_half, is_host, to_host, words
from hpcdp.errors import ArrayMixError


def test_numpy_arrays_and_scalars_are_numpys():
    assert array_namespace(np.zeros(2), np.float32(1), 3.0) is np
    assert array_namespace(1, 2.5) is array_namespace(np.float32(1)) is np
    assert array_namespace(standin.asarray(np.zeros(2)), np.float32(1), dtype_of("bfloat16").type(2)) is standin


def test_a_stand_in_names_its_own_namespace():
    x = standin.asarray(np.arange(3.0))
    assert array_namespace(x, 2.0) is standin
    assert not is_host(x)
    np.testing.assert_array_equal(to_host(x), np.arange(3.0))


def test_mixing_namespaces_is_refused_by_name():
    with raises(ArrayMixError, operation="array_namespace", got="standin"):
        array_namespace(np.zeros(2), standin.asarray(np.zeros(2)))


def test_what_is_no_array_is_refused():
    with raises(ArrayMixError, operation="array_namespace", got="str"):
        array_namespace("x")


def test_host_arrays_pass_without_a_copy():
    x = np.arange(4)
    assert to_host(x) is x
    assert from_host(x, np.zeros(1)) is x


def test_from_host_moves_to_the_others_namespace():
    moved = from_host(np.arange(4.0), standin.asarray(np.zeros(1)))
    assert array_namespace(moved) is standin
    np.testing.assert_array_equal(to_host(moved), np.arange(4.0))


def test_bfloat16_is_a_dtype_by_its_name():
    assert dtype_of("bfloat16") == ml_dtypes.bfloat16 and dtype_of("f2") == np.float16
    with pytest.raises(TypeError, match="bfloat17"):
        dtype_of("bfloat17")


@pytest.mark.parametrize(("name", "floats", "of_16_bits", "kind"), [
    ("bfloat16", True, True, "int16"), ("float16", True, True, "uint16"), ("float32", True, False, "float32"),
    ("int16", False, False, "int16"), ("bool", False, False, "bool"),
])  # fmt: skip
def test_floats_of_16_bits_are_told_from_others_and_become_integers_without_a_copy(name, floats, of_16_bits, kind):
    x = np.ones((2, 3), dtype_of(name))
    assert (is_float(x.dtype), is_half(x)) == (floats, of_16_bits)
    for each in (x, standin.asarray(x)):
        assert words(each).dtype == kind
        words(each)[...] = 0
        assert not to_host(each).any()


def test_who_does_not_name_bfloat16_does_not_import_it():
    program = """
import sys
from hpcdp.core import arrays; from hpcdp import nn
from hpcdp.train import fit
from hpcdp.data_parallel import base_trainer
nn.Dense(2, 3).to("float16")
assert "ml_dtypes" not in sys.modules
nn.Dense(2, 3).to("bfloat16")
assert "ml_dtypes" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
