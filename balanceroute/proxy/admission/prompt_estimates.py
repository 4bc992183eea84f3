"""Estimates the tokens of prompts that no engine has counted yet, learned per model from counted ones.

tokens ~ weights . traits (`wire/prompt_traits.py`). A model's weights start at values common to three public
tokenizers, and follow prefillers' answers by recursive least squares of the relative error, so that prompts of all
lengths count the same. The prior keeps the weights of traits that the model's prompts have not had yet.

Before learning, the error is nearly always within 15 % for English, source code and tools, and within 40 % for Chinese,
where tokenizers differ; after some dozens of answers it is within 25 % for all
(`tests/unit/proxy/admission/test_prompt_estimates.py`).
"""

from collections import OrderedDict
from typing import Final

import numpy as np

from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.prompt_traits import TRAITS, Traits, traits_of, weigh, weights_of_pairs

MAX_MODELS: Final = 64
# tokens per unit, and its spread between models; fitted to Qwen's, DeepSeek's and OpenAI's cl100k_base
_PRIOR: Final = {
    "prompts": (3.0, 8.0),
    "messages": (-7.0, 4.0),  # role, content and their brackets in JSON are 9 marks and words, a template's turn is 4
    "words": (0.8, 0.2),
    "letters": (0.07, 0.04),
    "capitals": (0.65, 0.3),
    "digit_runs": (1.6, 0.6),
    "digits": (0.2, 0.4),
    "mark_runs": (0.0, 0.3),
    "marks": (0.57, 0.2),
    "newline_runs": (0.0, 0.3),
    "indents": (0.6, 0.4),
    "wide": (0.65, 0.4),
    "letters_2": (0.5, 0.4),
    "letters_3": (1.5, 1.0),
    "letters_4": (2.0, 1.0),
    "media": (5.0, 300.0),
    "patches": (1.0, 0.5),
}
_PRIOR_WEIGHTS: Final = [_PRIOR[name][0] for name in TRAITS]
_PRIOR_VARIANCE: Final = np.array([_PRIOR[name][1] ** 2 for name in TRAITS])
_NOISE: Final = 0.08**2  # squared relative error that remains with the right weights
_FORGETTING: Final = 0.9995  # a model whose prompts change is followed within some thousands of answers
_MAX_SURPRISE: Final = 1.0  # relative; one odd prompt moves the weights no further
_FARTHEST: Final = 4.0
_OTHERS: Final = [TRAITS.index(name) for name in ("prompts", "messages", "media", "patches")]  # not counts of bytes
_EAGER, _GOOD = 200, 0.05  # after this many answers, errors within 5 % are not worth 30 us to learn from


class _Weights:
    """One model's weights, and their uncertainty.

    Attributes: `answers`: the number learned from, or estimated too well to learn from.
    """

    __slots__ = ("_both", "_covariance", "_of_pairs", "_others", "answers")

    def __init__(self) -> None:
        self._both = np.array([_PRIOR_WEIGHTS, _PRIOR_WEIGHTS])  # of this model, and the prior
        self._covariance = np.diag(_PRIOR_VARIANCE)
        self.answers = 0
        self._fold()

    def _fold(self) -> None:
        """Prepare what `tokens` needs: a prompt's pairs of bytes are weighed without making its traits."""
        self._of_pairs = weights_of_pairs(self._both)
        self._others = self._both[:, _OTHERS].tolist()

    def tokens(self, request: ClientRequest) -> float:
        """The estimated tokens of a prompt."""
        own, usual_tokens, media, patches = weigh(request, self._of_pairs)
        (prompt, message, medium, patch), usual = self._others
        tokens = own + prompt + message * request.messages
        if media:
            return float(tokens + medium * media + patch * patches)
        usual_tokens += usual[0] + usual[1] * request.messages
        # bounds: no tokenizer differs more from all others
        if not usual_tokens / _FARTHEST <= tokens <= usual_tokens * _FARTHEST:
            tokens = min(usual_tokens * _FARTHEST, max(usual_tokens / _FARTHEST, tokens))
        return float(tokens)

    def learn(self, traits: Traits, tokens: int) -> None:
        weights = self._both[0]
        error = 1.0 - float(weights.dot(traits)) / tokens
        relative = traits / tokens
        covariance = self._covariance
        direction = covariance.dot(relative)
        gain = direction / (_NOISE + relative.dot(direction))
        weights += gain * min(_MAX_SURPRISE, max(-_MAX_SURPRISE, error))
        covariance -= gain[:, None] * direction
        covariance /= _FORGETTING
        # a trait not seen for long must not become more uncertain than at first
        grown = np.sqrt(np.minimum(1.0, _PRIOR_VARIANCE / np.maximum(covariance.diagonal(), 1e-12)))
        covariance *= grown[:, None] * grown
        self._fold()


class PromptEstimates:
    """The estimates of one router."""

    def __init__(self) -> None:
        """Begin with the common weights."""
        self._models: OrderedDict[str, _Weights] = OrderedDict()
        self._unknown = _Weights()

    def estimate(self, request: ClientRequest) -> int:
        """The estimated tokens of the request's prompt, at least 1."""
        weights = self._models.get(request.model or "", self._unknown)
        tokens = round(weights.tokens(request))
        return tokens if tokens > 1 else 1

    def learn(self, request: ClientRequest, estimated_tokens: int, tokens: int) -> None:
        """Learn from a prompt that was estimated, and whose tokens a prefiller has counted."""
        if tokens < 1 or request.rest.get("truncate_prompt_tokens") is not None:
            return
        model = request.model or ""
        weights = self._models.get(model)
        if weights is None:
            weights = self._models[model] = _Weights()
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        weights.answers += 1
        if weights.answers <= _EAGER or abs(estimated_tokens - tokens) >= _GOOD * tokens:
            weights.learn(traits_of(request), tokens)


def has_estimate(request: ClientRequest) -> bool:
    """Whether the size of its prompt is estimated: it is neither token ids nor embeddings."""
    return request.endpoint == "chat" or request.prompt_json.startswith(b'"')
