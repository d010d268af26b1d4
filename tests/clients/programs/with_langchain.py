"""langchain-openai under langchain-tests' standard suite, against a scripted model."""

import os

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class _Standard(ChatModelIntegrationTests):
    responses = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {
            "model": "tiny",
            "base_url": os.environ["GRAFT_URL"] + "/v1",
            "api_key": "none",
            "max_retries": 0,
            "stream_usage": True,
            "use_responses_api": self.responses,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "tiny"


class TestChatCompletions(_Standard):
    """Over /v1/chat/completions."""


class TestResponses(_Standard):
    """Over /v1/responses."""

    responses = True
