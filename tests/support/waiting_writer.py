"""A checkpoint writer that can be waited for, and that needs no process of its own."""

from gptddp.checkpoint import saver, writer


class Writer(writer.Writer):
    """`save` is `submit`, and the wait for its commit; what the saver does, its thread does."""

    def save(self, step, tensors, meta) -> writer.Saved:
        """The result; a step that is committed already is not saved again."""
        self.wait()
        if not self.submit(step, tensors, meta):
            return writer.Saved(step, str(self.parent), 0, 0.0, 0.0, None)
        self.wait()
        return self._results.pop()

    def _start(self, staging):
        pass

    def _save(self, request):
        def before_rename():
            self.before_commit()
            self.fence()

        data = self._staging.buffer.numpy().data[: request["nbytes"]]
        saver.save(request, data, before_rename, self.wrote)
