"""What benchmarks share: timings that alternate, facts about the machine, other libraries, sizes, files of figures."""
