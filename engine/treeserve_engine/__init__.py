"""The model engine: weights, decoder, paged KV, ragged batches, and the one sampler that verification replays."""
