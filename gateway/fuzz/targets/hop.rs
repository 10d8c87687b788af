#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kruntimes_gateway_fuzz::hop(data));
