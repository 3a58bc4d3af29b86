"""Methods of objects that go."""

from hpcdp.comm.world import WeakMethods


class Named:
    def __init__(self, name):
        self.name = name

    def told(self):
        return self.name


def test_methods_keep_no_object_alive_and_those_of_the_dead_are_dropped():
    methods, living = WeakMethods(), [Named(0), Named(1)]
    for each in living:
        methods.add(each.told)
    for number in range(2, 100):
        methods.add(Named(number).told)
        assert len(methods) <= 3
    assert [method() for method in methods.living()] == [0, 1]
    del living[0], each
    methods.add(living[0].told)
    assert [method() for method in methods.living()] == [1, 1]
    assert len(methods) == 2
