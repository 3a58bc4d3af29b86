"""What a plan must not get wrong: results that are kept, backwards that are late, networks that change, threads."""

import copy
import threading

import numpy as np
import pytest
import standin

import hpcdp
from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.errors import ConfigError, HpcdpError
from hpcdp.nn.hybrid.plan import Plan

F = nn.functional


def arrays(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def pair(net=None):
    net = nn.models.mlp(6, 3, (5,)) if net is None else net
    plain = copy.deepcopy(net)
    net.hybridize()
    return net, plain


def warm(net, x, times=3):
    for _ in range(times):
        net(x)
        with autograd.record():
            y = net(x)
        y.backward()


def same_gradients(net, plain):
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        np.testing.assert_array_equal(own.grad, other.grad, err_msg=own.name)


def in_both(net, plain, call):
    """What ``call`` gives for each, which must be the same; so must the gradients it leaves."""
    found = [call(each) for each in (net, plain)]
    for a, b in zip(*[each if isinstance(each, list) else [each] for each in found], strict=True):
        np.testing.assert_array_equal(a, b)
    same_gradients(net, plain)


@pytest.fixture
def plans(monkeypatch):
    """The plans that are made meanwhile."""
    made = []
    before = Plan.__init__

    def init(self, *args):
        before(self, *args)
        made.append(self)

    monkeypatch.setattr(Plan, "__init__", init)
    return made


def test_a_plan_is_made_once_and_replayed(plans):
    net, plain = pair()
    calls = []
    net.forward = lambda x, forward=net.forward: calls.append(1) or forward(x)
    for number in range(5):
        np.testing.assert_array_equal(net(arrays(2, 6, seed=number)).data, plain(arrays(2, 6, seed=number)).data)
    assert len(plans) == len(calls) == 1
    net.hybridize(False)
    net(arrays(2, 6))
    assert len(plans) == 1 and len(calls) == 2


def test_results_of_earlier_calls_stay():
    net, plain = pair()
    inputs = [arrays(2, 6, seed=number) for number in range(5)]
    found = [net(x) for x in inputs]
    for x, y in zip(inputs, found, strict=True):
        np.testing.assert_array_equal(y.data, plain(x).data)


def test_several_forwards_come_before_a_backward(plans):
    net, plain = pair()
    inputs = [arrays(2, 6, seed=number) for number in range(4)]
    warm(net, inputs[0])
    made = len(plans)

    def siamese(each):
        with autograd.record():
            a, b, c = (each(x) for x in inputs[:3])
            loss = ((a - b) * c).sum()
            with autograd.pause():
                each(inputs[3])
        each(inputs[3])
        loss.backward()
        return loss.data

    for _ in range(3):
        in_both(net, plain, siamese)
    assert len(plans) == made + 2  # two more of the recorded kind, which are used again


def test_gradients_accumulate():
    net, plain = pair()
    for each in (net, plain):
        for param in each.parameters():
            param.attach_grad("add")
    warm(net, arrays(2, 6))
    warm(plain, arrays(2, 6))
    same_gradients(net, plain)


def test_backward_through_a_kept_graph_and_through_a_freed_one():
    net, plain = pair()
    x = arrays(2, 6)
    warm(net, x)

    def twice(each):
        with autograd.record():
            y = each(x)
        y.backward(retain_graph=True)
        first = [param.grad.copy() for param in each.parameters()]
        with autograd.record():
            other = each(x * 2)
        other.backward()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(HpcdpError, match="an earlier backward has freed"):
            y.backward()
        return first

    in_both(net, plain, twice)


def test_a_tape_that_is_dropped_frees_its_plan(plans):
    net, _ = pair()
    x = arrays(2, 6)
    for _ in range(5):
        with autograd.record():
            net(x)
    assert len(plans) == 1


def test_a_forward_in_a_hook_during_backward_overwrites_nothing():
    net, plain = pair()
    x = arrays(2, 6)
    warm(net, x)

    def run(each):
        def hook(param):
            with autograd.record():
                each(x * 3)

        each.parameters()[-1].grad_hook = hook
        with autograd.record():
            y = each(x)
        y.backward()
        return y.data

    in_both(net, plain, run)


def test_hooks_come_in_the_same_order_with_gradients_complete():
    net, plain = pair(nn.models.lenet((1, 8, 8)))
    x = arrays(2, 1, 8, 8)

    def run(each):
        seen = []
        for param in each.parameters():
            param.grad_hook = lambda param: seen.append((param.name, param.grad.copy()))
        with autograd.record():
            y = each(x)
        y.backward()
        assert seen[0][0].startswith("6.")
        return [np.array([name for name, _ in seen]), *[grad for _, grad in seen]]

    for _ in range(3):
        in_both(net, plain, run)


def test_gradients_of_inputs_and_of_what_came_before():
    net, plain = pair()
    weights = arrays(6, 6, seed=5)

    def run(each):
        w = Tensor(weights)
        w.attach_grad()
        with autograd.record():
            y = each(each(Tensor(arrays(2, 6)) @ w)[:, [0, 1, 2, 0, 1, 2]])
            loss = (y * y).sum()
        first = autograd.grad(loss, [w, *each.parameters()], retain_graph=True)
        loss.backward()
        return [*first, w.grad]

    for _ in range(4):
        in_both(net, plain, run)


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


def test_weights_that_are_tied_and_used_twice():
    class Tied(nn.Module):
        def __init__(self):
            self.a, self.b = nn.Dense(4, 4), nn.Dense(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x))) @ self.a.weight

    net, plain = pair(Tied())

    def run(each):
        with autograd.record():
            y = each(arrays(3, 4))
        y.backward()
        return y.data

    for _ in range(4):
        in_both(net, plain, run)


def test_hybridized_parts_of_a_network_that_is_none():
    class Depends(nn.Module):
        def __init__(self):
            self.part = nn.models.mlp(6, 3, (5,))

        def forward(self, x):
            y = self.part(x)
            return y if float(y.sum().item()) > 0 else -y

    net, plain = Depends(), None
    plain = copy.deepcopy(net)
    net.part.hybridize()
    for number in range(6):
        np.testing.assert_array_equal(net(arrays(2, 6, seed=number)).data, plain(arrays(2, 6, seed=number)).data)
    outer = nn.Sequential(net.part)
    outer.hybridize()
    for _ in range(3):
        np.testing.assert_array_equal(outer(arrays(2, 6)).data, plain.part(arrays(2, 6)).data)


def test_threads_have_plans_of_their_own():
    net, plain = pair()
    wrong = []

    def run(seed):
        for number in range(50):
            x = arrays(2, 6, seed=100 * seed + number)
            if not np.array_equal(net(x).data, plain(x).data):
                wrong.append((seed, number))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_copies_have_plans_of_their_own():
    net, plain = pair()
    warm(net, arrays(2, 6))
    other = copy.deepcopy(net)
    for param in other.parameters():
        param.data[...] *= 2
    for _ in range(3):
        np.testing.assert_array_equal(net(arrays(2, 6)).data, plain(arrays(2, 6)).data)
    assert not np.array_equal(other(arrays(2, 6)).data, plain(arrays(2, 6)).data)


def test_arrays_on_a_device_go_without_a_plan():
    net, plain = pair()
    net.to(like=standin.asarray(np.zeros(1)))
    for _ in range(3):
        found = net(standin.asarray(arrays(2, 6))).data
        np.testing.assert_allclose(found.to_host(), plain(arrays(2, 6)).data, rtol=1e-5)


def test_inputs_and_attributes_that_are_returned_are_themselves():
    class Returns(nn.Module):
        def __init__(self):
            self.weight = nn.Parameter(arrays(3))

        def forward(self, x, y):
            return [x, self.weight, y + 1, y]

    net = Returns()
    net.hybridize()
    for _ in range(3):
        x, y = Tensor(arrays(2)), Tensor(arrays(3))
        found = net(x, y)
        assert found[0] is x and found[1] is net.weight and found[3] is y
        np.testing.assert_array_equal(found[2].data, y.data + 1)


def test_a_wrong_label_is_found_in_a_replay():
    class Loss(nn.Module):
        def forward(self, x, y):
            return F.softmax_cross_entropy(x, y)

    net = Loss()
    net.hybridize()
    for _ in range(3):
        net(arrays(2, 3), np.array([0, 1]))
    with pytest.raises(HpcdpError, match=r"labels.*expected 0 to 2, got 0 to 3"):
        net(arrays(2, 3), np.array([0, 3]))


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


def test_every_thread_makes_its_own_plan(plans):
    net, _ = pair()
    for _ in range(2):
        thread = threading.Thread(target=lambda: [net(arrays(2, 6)) for _ in range(3)])
        thread.start()
        thread.join()
    assert len(plans) == 2


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


class Counts(nn.Module):
    """Changes a tensor of its own in place."""

    def __init__(self, how):
        self.seen = Tensor(np.zeros(2, np.float32))
        self.__dict__["how"] = how

    def forward(self, x):
        self.how(self.seen)
        return x + 1


def assigned(seen):
    seen[...] = 3


def added(seen):
    seen += 1


@pytest.mark.parametrize("how", [assigned, added])
def test_state_that_a_replay_would_not_change_is_refused(how):
    net = Counts(how)
    net(arrays(2))
    net.hybridize()
    with pytest.raises(HpcdpError, match=r"_safety\.py:\d+.*got a change in place; return what is to be kept"):
        net(arrays(2))
    net.hybridize(False)
    net(arrays(2))


def test_replicas_are_called_as_usual():
    devices = [hpcdp.cpu(0), hpcdp.cpu(1)]

    def make():
        return nn.Sequential(nn.Dense(6, 4, weight_init=nn.init.Xavier(1)), nn.BatchNorm(4), nn.ReLU())

    def steps(net, replicas):
        found = []
        for seed in range(4):
            with autograd.record():
                y = replicas(arrays(5, 6, seed=seed))
                loss = y * y
            loss.backward()
            found += [y.data, *[param.grad.copy() for param in net.parameters()]]
        for where in devices:
            found += [tensor.data for _, tensor in replicas.on(where).named_buffers()]
        return found

    plain = make()
    expected = steps(plain, nn.Replicas(plain, devices))
    for part_alone in (True, False):
        net = make()
        replicas = nn.Replicas(net, devices)
        if part_alone:
            net.hybridize()
            replicas = nn.Replicas(net, devices)
        else:
            replicas.hybridize()
        for a, b in zip(steps(net, replicas), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match=r"parts that can be traced, got Replicas"):
        replicas.graph()
