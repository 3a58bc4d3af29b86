"""Networks, parameters and inputs that change between calls: the plan sees it, or is made anew."""

import copy

import numpy as np
import pytest
from with_and_without import arrays, in_both, pair, warm

from hpcdp import autograd, nn


def test_what_is_learnt_can_change_between_calls():
    net, plain = pair()
    x = arrays(2, 6)
    warm(net, x)

    def run(each, reqs):
        for param, req in zip(each.parameters(), reqs, strict=True):
            param.attach_grad(req)
        with autograd.record():
            y = each(x)
        y.backward()
        return y.data

    for reqs in (["write"] * 4, ["null", "null", "add", "write"], ["write", "null", "write", "null"]):
        found = [run(each, reqs) for each in (net, plain)]
        np.testing.assert_array_equal(*found)
        for own, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None)
            if own.grad is not None:
                np.testing.assert_array_equal(own.grad, other.grad)


def test_a_copy_has_plans_of_its_own():
    class Scale(nn.Module):
        def __init__(self, factor):
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    net, x = Scale(2.0), arrays(2, 3)
    net.hybridize()
    for copied in (copy.copy(net), copy.deepcopy(net), copy.copy(copy.copy(net))):
        copied.factor = 3.0
        for _ in range(3):
            np.testing.assert_array_equal(copied(x).data, x * 3)
            np.testing.assert_array_equal(net(x).data, x * 2)
        assert len(copied._hybrid._here.known) == 1


def test_new_values_and_new_arrays_of_parameters_are_seen():
    net, plain = pair(nn.Sequential(nn.Dense(6, 3), nn.BatchNorm(3)))
    x = arrays(2, 6)
    warm(net, x)
    warm(plain, x)
    state = {name: arrays(*value.shape, seed=8) ** 2 for name, value in plain.state_dict().items()}

    def loaded(each):
        each.load_state_dict(state)

    def replaced(each):
        for param in each.parameters():
            param.data = param.data * 2

    def buffers(each):
        for _, buffer in each.named_buffers():
            buffer.data = buffer.data + 1

    def wider(each):
        each.to(np.float64)

    for change in (loaded, replaced, buffers, wider):
        for each in (net, plain):
            change(each)
        given = x if change is not wider else x.astype(np.float64)
        for _ in range(3):
            in_both(net, plain, lambda each, given=given: each(given).data)


def test_an_update_that_is_under_way_is_waited_for_where_it_is_read():
    net, plain = pair(nn.models.mlp(6, 3, (5, 4)))
    x = arrays(2, 6)
    warm(net, x)
    order = []
    for number, param in enumerate(net.parameters()):

        def hook(param, number=number):
            order.append(number)
            param.data_hook = None
            param.data[...] *= 0.5
            if number == 0:
                assert net.parameters()[-1].data_hook is not None

        param.data_hook = hook
        plain.parameters()[number].data[...] *= 0.5
    np.testing.assert_array_equal(net(x).data, plain(x).data)
    assert order == list(range(6))
    np.testing.assert_array_equal(net(x).data, plain(x).data)


def test_other_shapes_dtypes_and_layouts_are_traced_anew(plans):
    net, plain = pair()
    for number in range(40):
        for _ in range(3):
            x = arrays(1 + number, 6, seed=number)
            np.testing.assert_array_equal(net(x).data, plain(x).data)
    assert len(net._hybrid._here.known) == 16
    for x in (arrays(6, 4).T, arrays(4, 12)[:, ::2], arrays(0, 6)):
        for _ in range(3):
            np.testing.assert_array_equal(net(x).data, plain(x).data)


def test_a_network_that_is_changed_is_traced_anew():
    net, plain = pair(nn.Sequential(nn.Dense(6, 6), nn.Dense(6, 3)))
    x = arrays(2, 6)
    warm(net, x)
    for each in (net, plain):
        each.add(nn.Tanh())
        setattr(each, "0", nn.Dense(6, 6, weight_init=nn.init.Xavier(3)))
    for _ in range(3):
        np.testing.assert_array_equal(net(x).data, plain(x).data)
    for each in (net, plain):
        each[1].activation = "relu"
    for _ in range(3):
        np.testing.assert_array_equal(net(x).data, plain(x).data)


class Takes(nn.Module):
    def __init__(self, rows):
        self.scale = nn.Parameter(arrays(3))
        self.rows = rows

    def forward(self, x):
        return (x * self.scale)[self.rows]


def changed_number(rows):
    rows[0] = rows[-1]


def shorter(rows):
    del rows[1:]


def changed_within(rows):
    if isinstance(rows[0], list):
        rows[0][0] = 2
    else:
        rows += [2, 2]


@pytest.mark.parametrize("rows", [[0, 1, 0], [[0, 1], [1, 0]]], ids=["flat", "nested"])
@pytest.mark.parametrize("change", [changed_number, shorter, changed_within])
@pytest.mark.parametrize("recording", [False, True])
def test_a_list_of_numbers_that_is_changed_in_place_is_seen(rows, change, recording):
    net, plain = pair(Takes(copy.deepcopy(rows)))

    def run(each):
        with autograd.record() if recording else autograd.pause():
            y = each(arrays(3, 3))
        if recording:
            y.backward()
        return y.data

    for number in range(6):
        if number == 3:
            change(net.rows)
            change(plain.rows)
        found, expected = run(net), run(plain)
        np.testing.assert_array_equal(found, expected, strict=True)
        np.testing.assert_array_equal(net.scale.grad, plain.scale.grad)
    assert len(net._hybrid._here.known) == 1


def test_the_short_way_sees_new_arrays_and_updates_under_way():
    net, plain = pair()
    x = arrays(1, 6)
    for _ in range(4):
        net(x)
    assert net._hybrid._here.shortcut is not None
    for each in (net, plain):
        for param in each.parameters():
            param.data = param.data * 2
    for _ in range(4):
        np.testing.assert_array_equal(net(x).data, plain(x).data)
    waited = []

    def hook(param):
        waited.append(param)
        param.data_hook = None
        param.data[...] *= 0.5

    net.parameters()[0].data_hook = hook
    plain.parameters()[0].data[...] *= 0.5
    np.testing.assert_array_equal(net(x).data, plain(x).data)
    assert len(waited) == 1


def test_parameters_of_another_shape_are_traced_anew():
    class Flat(nn.Module):
        def __init__(self):
            self.weight = nn.Parameter(arrays(6, 4))

        def forward(self, x):
            return (x @ self.weight).reshape(x.shape[0] * self.weight.shape[1])

    net, plain = pair(Flat())
    for columns in (4, 3):
        for each in (net, plain):
            each.weight.data = arrays(6, columns, seed=9)
        for _ in range(4):
            np.testing.assert_array_equal(net(arrays(2, 6)).data, plain(arrays(2, 6)).data)


def test_statistics_move_although_nobody_needs_the_result():
    class Watches(nn.Module):
        def __init__(self):
            self.norm = nn.BatchNorm(3)

        def forward(self, x):
            self.norm(x)
            return x * 2

    net, plain = pair(Watches())
    for seed in range(4):
        with autograd.train_mode():
            net(arrays(4, 3, seed=seed)), plain(arrays(4, 3, seed=seed))
        np.testing.assert_array_equal(net.norm.running_mean.data, plain.norm.running_mean.data)
        np.testing.assert_array_equal(net.norm.running_var.data, plain.norm.running_var.data)


def test_layers_find_out_their_shapes_in_a_first_call_without_a_plan(plans):
    def make():
        return nn.Sequential(nn.Dense(None, 5, weight_init=nn.init.Xavier(1)), nn.BatchNorm(None), nn.LayerNorm(None))

    net, plain = make(), make()
    net.hybridize()
    for seed in range(4):
        np.testing.assert_array_equal(net(arrays(2, 6, seed=seed)).data, plain(arrays(2, 6, seed=seed)).data)
    assert len(plans) == 1
