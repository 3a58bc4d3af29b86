"""What benchmarks share: timings that alternate, facts about the machine, other libraries, jobs, files of figures."""
