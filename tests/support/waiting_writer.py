"""A checkpoint writer that can be waited for."""

from gptddp.checkpoint import writer


class Writer(writer.Writer):
    """`save` is `submit`, and the wait for its commit."""

    def save(self, step, tensors, meta) -> writer.Saved:
        """The result; a step that is committed already is not saved again."""
        self.wait()
        if not self.submit(step, tensors, meta):
            return writer.Saved(step, str(self.parent), 0, 0.0, 0.0, None)
        self.wait()
        return self._results.pop()
