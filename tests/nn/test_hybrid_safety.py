"""What a plan must not get wrong: results that are kept, backwards that are late, gradients of inputs, threads."""

import copy
import threading

import numpy as np
import standin
from raises import raises
from with_and_without import arrays, in_both, pair, same_gradients, warm

import hpcdp
from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.errors import ConfigError, HpcdpError

F = nn.functional


def test_what_records_by_itself_goes_without_a_plan_where_the_call_does_not(plans):
    class Records(nn.Module):
        def __init__(self):
            self.weight = nn.Parameter(np.ones(3, np.float32))

        def forward(self, x):
            with autograd.record():
                return x * self.weight

    net, x = Records(), arrays(2, 3)
    net.hybridize()
    for _ in range(4):
        net(x).backward()
        np.testing.assert_array_equal(net.weight.grad, x.sum(axis=0))
    assert not plans
    for _ in range(3):
        with autograd.record():
            y = net(x)
        y.backward()
    assert len(plans) == 1


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


class Shifted(nn.Module):
    def __init__(self):
        self.layer = nn.Dense(6, 3)

    def forward(self, x, by):
        return F.relu(self.layer(x) * by + by) / by


def test_inputs_without_axes_are_planned(plans):
    net, plain = pair(Shifted())
    for number in range(4):
        x = arrays(2, 6, seed=number)
        for by in (np.float32(number + 2), np.array(number + 2, np.float32), Tensor(arrays(5, seed=number)).sum()):
            np.testing.assert_array_equal(net(x, by).data, plain(x, by).data)

        def trained(each, x=x):
            by = Tensor(np.ones(3, np.float32))
            by.attach_grad()
            with autograd.record():
                loss = each(x, by.sum()).sum()
            loss.backward()
            return [loss.data, by.grad]

        in_both(net, plain, trained)
    assert len(plans) == 2
    assert len(net.graph().inputs) == 2


def test_inputs_that_are_repeated_along_an_axis_go_without_a_plan(plans):
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(axis=0)

    net, plain = pair(Mean())
    x = np.broadcast_to(arrays(1, 1000), (40, 1000))
    for _ in range(4):
        np.testing.assert_array_equal(net(x).data, plain(x).data)
    assert plans == []


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
        with raises(HpcdpError, operation="backward", remedy="retain_graph=True"):
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
    with raises(HpcdpError, operation="softmax_cross_entropy", where="labels", expected=[0, 2], got=[0, 3]):
        net(arrays(2, 3), np.array([0, 3]))


def test_every_thread_makes_its_own_plan(plans):
    net, _ = pair()
    for _ in range(2):
        thread = threading.Thread(target=lambda: [net(arrays(2, 6)) for _ in range(3)])
        thread.start()
        thread.join()
    assert len(plans) == 2


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
    with raises(ConfigError, operation="hybridize", where="Replicas", got="Replicas"):
        replicas.graph()
