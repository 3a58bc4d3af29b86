"""Floor 6: train. Imports: gradients, collectives, nn, optim, data, comm, autograd, kernels, arrays, errors."""
