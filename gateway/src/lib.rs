//! HTTPS in, one gRPC hop out.
