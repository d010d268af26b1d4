#!/bin/sh
# gRPC by grpcurl: the server tells its protos by reflection, so no files are needed.
set -eu
address=${GRAFT_GRPC:-127.0.0.1:8001}

grpcurl -plaintext "$address" list
grpcurl -plaintext "$address" describe graft.v1.GatewayService
grpcurl -plaintext "$address" grpc.health.v1.Health/Check
grpcurl -plaintext "$address" graft.v1.GatewayService/GetServerInfo

grpcurl -plaintext -d '{
  "messages": [{"role": "user", "content": "Why is the sky blue?"}],
  "options": {"max_tokens": 24, "temperature": 0}}' \
  "$address" graft.v1.GatewayService/Chat

grpcurl -plaintext -d '{
  "messages": [{"role": "user", "content": "Why is the sky blue?"}],
  "options": {"max_tokens": 24, "temperature": 0}}' \
  "$address" graft.v1.GatewayService/ChatStream
