"""Floor 7: benchmarks. Imports: bench, launch, comm, collectives, compression, gradients, kvstore, checkpoint,
parallel, train, nn, optim, autograd, kernels, engine, streams, devices, replacing, arrays, launched, errors.

How fast hpcdp is, always as a ratio to a peer or to a limit of the machine that is measured in the same run.

- `floor` measures the machine: bare exchanges over shared memory, the copy rate, the latency between two cores.
- `compare` alternates allreduce with the floor and other libraries.
- `cluster` makes hosts with slow links out of namespaces; `fabric` measures allreduce across them.
- `gradients` does so for gradients through a Trainer: reduce and update.
- `compression` times training steps over slow links with every codec, `convergence` is what codecs do to accuracy.
- `reproducible` is what the same bits on any number of ranks cost.
- `hybrid` times calls of networks with and without a plan, bare, and in PyTorch.
- `engine` times a push to the dependency engine.
- `train_lenet` trains LeNet here and in PyTorch, `train_models` a character LSTM, ResNet-18 and a wide MLP; `accuracy`
  is what networks learn; `startup` times the import and the launch.
- `gpu` is a script for a machine that has one; `on_gpu` is what it runs there: jobs of ranks, kernels, networks.
- `run` is the suite; `reporting` holds what it measured against the targets, and writes ``benchmarks/RESULTS.md``.
- `harness` is what they share: other libraries, jobs, how programs begin and end. Timings that alternate, facts about
  the machine and files of figures are those of `hpcdp.bench`.

No benchmark fails because of time; a wrong result does fail it.
"""
