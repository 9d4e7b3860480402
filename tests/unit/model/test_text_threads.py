"""A long text is encoded beside the event loop, not instead of it."""

import threading
import time

from tokenizers_for_tests import CHATML, byte_level_json

from tailrace.model.text import TextModel


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    model = TextModel(byte_level_json(), end_token_ids=(3,), chat_template=CHATML)
    text = "hello world, the stream goes on and on " * 25_000
    begins, is_done = threading.Event(), threading.Event()

    def encode() -> None:
        begins.set()
        model.encode(text, special=False)
        is_done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begins.wait()
    num_turns = 0
    while not is_done.is_set():
        num_turns += 1
        time.sleep(0)  # offers the interpreter, as an event loop does
    thread.join()
    assert num_turns > 500, (
        "an encoder that holds the interpreter leaves some twenty turns, one that does not ten thousand"
    )
