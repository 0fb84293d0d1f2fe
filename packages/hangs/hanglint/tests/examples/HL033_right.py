def entropies(accelerator, entropy, mask):
    chosen = accelerator.pad_across_processes(entropy[mask], pad_index=0.0)
    return accelerator.gather(chosen)
