"""A tool environment of one's own: plain grpc and the contract, nothing else of Libra.

python docs/examples/own_environment.py --listen 127.0.0.1:7099
"""
# ruff: noqa: ANN001, ANN201, ANN204, ARG002, N802

import argparse
import json
from concurrent import futures

import grpc
from google.protobuf.duration_pb2 import Duration
from libra.v1 import toolenv_service_pb2 as pb
from libra.v1 import toolenv_service_pb2_grpc as pb_grpc

TTL, SCHEMA = Duration(seconds=600), '{"type": "object", "properties": {"expression": {"type": "string"}}}'


class Adder(pb_grpc.ToolEnvServiceServicer):  # methods that are not here answer UNIMPLEMENTED
    def __init__(self):
        self.opened, self.sessions = {}, {}

    def find(self, request, context, exact=False):
        if (session := self.sessions.get(request.session)) is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no session {request.session!r}")
        if request.epoch < session["epoch"] or (exact and request.epoch != session["epoch"]):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"epoch is {session['epoch']}, not {request.epoch}")
        return session

    def Describe(self, request, context):
        tool = pb.Tool(name="calculate", description="a+b", kind=pb.TOOL_KIND_PURE, parameters_json_schema=SCHEMA)
        return pb.DescribeResponse(environment="adder", version="1", tools=[tool], max_session_life=TTL)

    def OpenSession(self, request, context):
        if request.request_id not in self.opened:  # a repeated request must not start a second session
            name = self.opened[request.request_id] = f"adder-{len(self.opened)}"
            self.sessions[name] = {"epoch": request.epoch, "task": json.loads(request.task_json), "calls": {}}
        name = self.opened[request.request_id]
        return pb.OpenSessionResponse(session=name, ttl=TTL, observation=self.sessions[name]["task"]["question"])

    def AttachSession(self, request, context):
        session = self.find(request, context)
        session["epoch"] = request.epoch  # from now on, calls of the worker before are refused
        return pb.AttachSessionResponse(epoch=request.epoch, call_ids=session["calls"], ttl=TTL)

    def CallTool(self, request, context):
        calls, asked = self.find(request, context, exact=True)["calls"], (request.tool, request.arguments_json)
        if request.call_id not in calls:  # a repeated call must not run a second time
            calls[request.call_id] = (asked, add(request))
        if calls[request.call_id][0] != asked:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.call_id} was another call")
        return pb.CallToolResponse(call=calls[request.call_id][1])

    def GetCall(self, request, context):
        if request.call_id not in (calls := self.sessions.get(request.session, {}).get("calls", {})):
            context.abort(grpc.StatusCode.NOT_FOUND, f"{request.call_id} never started")
        return pb.GetCallResponse(call=calls[request.call_id][1])

    def Score(self, request, context):
        session = self.find(request, context, exact=True)
        right = request.final_answer.strip() == str(session["task"]["answer"])
        return pb.ScoreResponse(outcome=pb.TOOL_OUTCOME_OK, reward=session.setdefault("reward", float(right)))

    def RenewSession(self, request, context):
        return pb.RenewSessionResponse(ttl=TTL if self.find(request, context) else None)

    def CloseSession(self, request, context):
        if request.session in self.sessions and self.find(request, context):
            del self.sessions[request.session]
        return pb.CloseSessionResponse()


def add(request):  # what the model wrote may be anything: that is TOOL_ERROR, never an exception
    output, outcome = "error: expected calculate with a+b", pb.TOOL_OUTCOME_TOOL_ERROR
    try:
        left, _, right = json.loads(request.arguments_json)["expression"].partition("+")
        if request.tool == "calculate":
            output, outcome = str(int(left) + int(right)), pb.TOOL_OUTCOME_OK
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return pb.ToolCall(call_id=request.call_id, outcome=outcome, output=output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:7099", help="host:port; port 0 picks one, which is printed")
    listen = parser.parse_args().listen
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))  # one thread, one call at a time: no locks
    pb_grpc.add_ToolEnvServiceServicer_to_server(Adder(), server)
    print(f"{listen.rpartition(':')[0]}:{server.add_insecure_port(listen)}", flush=True)
    server.start()
    server.wait_for_termination()
