def embed(self, ids, pixel_values=None):
    embeddings = self.embed_tokens(ids)
    if pixel_values is not None:
        embeddings = embeddings + self.visual(pixel_values)
    return embeddings
