"""LongBench's English sets but code: prompt, length of an answer, metric (Bai et al. 2023; dataset2prompt.json and eval.py)."""

from __future__ import annotations

from dataclasses import dataclass

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_QASPER = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based on the "
    'information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
    '"unanswerable". Do not provide any explanation.\n\n'
)


@dataclass(frozen=True)
class LongBenchSet:
    """One set.

    Args:
        name: LongBench's.
        prompt: with {context} and {input}.
        max_new_tokens: of an answer.
        metric: "qa_f1_score", "rouge_score", "classification_score", "count_score" or "retrieval_score".
        first_line: whether only the first line of an answer counts (sets with examples, where a model goes on with one more).
    """

    name: str
    prompt: str
    max_new_tokens: int
    metric: str
    first_line: bool = False


PAPER = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique")
"""The six of Table 3: questions on one document, and on several."""

SETS: dict[str, LongBenchSet] = {
    one.name: one
    for one in (
        LongBenchSet(
            "narrativeqa",
            # "asconcisely" is LongBench's own.
            "You are given a story, which can be either a novel or a movie script, and a question. Answer the question asconcisely "
            "as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}\n\nNow, answer the "
            "question based on the story asconcisely as you can, using a single phrase if possible. Do not provide any "
            "explanation.\n\nQuestion: {input}\n\nAnswer:",
            128,
            "qa_f1_score",
        ),
        LongBenchSet(
            "qasper",
            f"You are given a scientific article and a question. Answer the question {_QASPER}Article: {{context}}\n\n"
            f" Answer the question based on the above article {_QASPER}Question: {{input}}\n\nAnswer:",
            128,
            "qa_f1_score",
        ),
        LongBenchSet(
            "multifieldqa_en",
            "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the above "
            "text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
            64,
            "qa_f1_score",
        ),
        LongBenchSet("hotpotqa", _PASSAGES, 32, "qa_f1_score"),
        LongBenchSet("2wikimqa", _PASSAGES, 32, "qa_f1_score"),
        LongBenchSet("musique", _PASSAGES, 32, "qa_f1_score"),
        LongBenchSet(
            "gov_report",
            "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}\n\n"
            "Now, write a one-page summary of the report.\n\nSummary:",
            512,
            "rouge_score",
        ),
        LongBenchSet(
            "qmsum",
            "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one or more "
            "sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript in one or more "
            "sentences.\n\nQuery: {input}\nAnswer:",
            512,
            "rouge_score",
        ),
        LongBenchSet(
            "multi_news",
            "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
            "Now, write a one-page summary of all the news.\n\nSummary:",
            512,
            "rouge_score",
        ),
        LongBenchSet(
            "trec",
            "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
            64,
            "classification_score",
            first_line=True,
        ),
        LongBenchSet(
            "triviaqa",
            "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
            "The following are some examples.\n\n{context}\n\n{input}",
            32,
            "qa_f1_score",
            first_line=True,
        ),
        LongBenchSet(
            "samsum",
            "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
            128,
            "rouge_score",
            first_line=True,
        ),
        LongBenchSet(
            "passage_count",
            "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read these "
            "paragraphs and determine how many unique paragraphs there are after removing duplicates. In other words, how many "
            "non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after "
            "removing duplicates. The output format should only contain the number, such as 1, 2, 3, and so on.\n\n"
            "The final answer is: ",
            32,
            "count_score",
        ),
        LongBenchSet(
            "passage_retrieval_en",
            "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract is "
            "from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the "
            'abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
            32,
            "retrieval_score",
        ),
    )
}
