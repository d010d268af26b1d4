#!/bin/sh
# REST by curl: what is served, one answer, the same as a stream, token ids.
set -eu
url=${GRAFT_URL:-http://127.0.0.1:8000}

curl -fsS "$url/v1/models"
echo

curl -fsS "$url/v1/chat/completions" -H 'content-type: application/json' -d '{
  "messages": [{"role": "user", "content": "Why is the sky blue?"}],
  "max_tokens": 24, "temperature": 0, "speculation": "auto"}'
echo

curl -fsSN "$url/v1/chat/completions" -H 'content-type: application/json' -d '{
  "messages": [{"role": "user", "content": "Why is the sky blue?"}],
  "max_tokens": 24, "temperature": 0, "stream": true,
  "stream_options": {"include_usage": true}}'

curl -fsS "$url/tokenize" -H 'content-type: application/json' -d '{"prompt": "hello"}'
echo
