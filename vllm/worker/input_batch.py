"""The running requests as the runner sees them: arrays over rows, changed a little each step.

Rows are the scheduler's. A row that belongs to nobody holds what was there last.
"""

import numpy as np

from vllm.messages import IntArray, NewRequest, SchedulerOutput


class InputBatch:
    """Tokens and block tables of every row.

    Attributes:
        token_ids: [rows, max_model_len] prompt and output tokens.
        num_tokens: [rows] how many of them are known.
        num_prompt_tokens: [rows] how many of them are the prompt.
        block_table: [rows, max_blocks] blocks in order of the tokens.
        num_blocks: [rows] how many of them are given.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks: int) -> None:
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens: IntArray = np.zeros(max_num_seqs, np.int32)
        self.block_table: IntArray = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks: IntArray = np.zeros(max_num_seqs, np.int32)

    def update(self, step: SchedulerOutput) -> None:
        """Place new requests and append blocks, as the scheduler decided."""
        for new in step.new_requests:
            self._place(new)
        if len(step.block_rows):
            self._append_blocks(step.block_rows, step.block_ids)

    def record(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append one sampled token to each row; both [n], no row twice."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def _place(self, new: NewRequest) -> None:
        row, prompt, output = new.row, new.request.prompt_token_ids, new.output_token_ids
        num_prompt, num_tokens = len(prompt), len(prompt) + len(output)
        self.token_ids[row, :num_prompt] = prompt
        self.token_ids[row, num_prompt:num_tokens] = output
        self.num_prompt_tokens[row] = num_prompt
        self.num_tokens[row] = num_tokens
        self.block_table[row, : len(new.block_ids)] = new.block_ids
        self.num_blocks[row] = len(new.block_ids)

    def _append_blocks(self, rows: IntArray, block_ids: IntArray) -> None:
        """Entries of a row that occurs several times follow each other, in order."""
        first = np.concatenate(([True], rows[1:] != rows[:-1]))
        starts = np.flatnonzero(first)
        run = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
        self.block_table[rows, self.num_blocks[rows] + run] = block_ids
        np.add.at(self.num_blocks, rows, 1)
