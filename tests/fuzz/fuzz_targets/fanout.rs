#![no_main]
#![allow(missing_docs, reason = "a binary; see the target")]

libfuzzer_sys::fuzz_target!(|data: &[u8]| (hedgerow_fuzz::FANOUT.check)(data));
