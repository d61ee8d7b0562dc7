// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A client that says anything, for libFuzzer: `run.sh`.
//!
//! The first byte of an input chooses: the second bit the API, the first one what is done. Even: what follows is the body of one function's record, taken as it is: what decodes must encode to
//! what decodes to the same. Odd: the rest is a source of numbers from which requests are made that decode, with values that
//! may make no sense; a session carries them out, with checks and tables as in a worker, on a driver that does nothing but touch
//! the memory it is given.
//!
//! - [`driver`], [`cuda`]: these drivers.
//! - [`client`]: the session, its link and its window.

pub mod client;
pub mod cuda;
pub mod driver;

use client::Client;
use std::sync::{Mutex, OnceLock};
use tombolo_accel_spec::wire::Malformed;
use tombolo_accel_spec::{cuda as cuda_wire, opencl};

/// The most requests of an input.
const REQUESTS: usize = 24;

/// Numbers out of bytes: most are small, some are whole words, some are close to the largest.
pub struct Numbers<'d>(&'d [u8]);

impl Numbers<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn next(&mut self) -> u64 {
        match self.byte() {
            None => 0,
            Some(b @ 0..=199) => u64::from(b),
            Some(b @ 200..=229) => u64::from(self.byte().unwrap_or(0)) << (b - 200),
            Some(b @ 230..=239) => u64::MAX - u64::from(b - 230),
            Some(b @ 240..=244) => (1 << 32) - u64::from(b - 240),
            Some(_) => (0..8).fold(0, |n, _| n << 8 | u64::from(self.byte().unwrap_or(0))),
        }
    }
}

/// Decodes a body and encodes it again.
type Recode = fn(u32, &[u8], &mut Vec<u8>) -> Option<Result<(), Malformed>>;

/// What is generated from the declarations of an API.
struct Api {
    functions: &'static [(u32, &'static str)],
    recode: Recode,
    make: fn(u32, &mut dyn FnMut() -> u64, &mut Vec<u8>) -> bool,
    /// Small numbers stay below this, so that many of them name an object that there is.
    small: u64,
}

const OPENCL: Api =
    Api { functions: opencl::FUNCTIONS, recode: opencl::recode, make: opencl::make, small: 256 };
const CUDA: Api =
    Api { functions: cuda_wire::FUNCTIONS, recode: cuda_wire::recode, make: cuda_wire::make, small: 11 };

fn records(api: &Api, body: &[u8]) {
    let Some((which, body)) = body.split_first() else { return };
    let (id, name) = api.functions[*which as usize % api.functions.len()];
    let (mut once, mut twice) = (Vec::new(), Vec::new());
    if let Some(Ok(())) = (api.recode)(id, body, &mut once) {
        assert_eq!(once.len(), body.len(), "{name}");
        assert_eq!((api.recode)(id, &once, &mut twice), Some(Ok(())), "{name}");
        assert_eq!(once, twice, "{name}");
    }
}

fn requests(api: &Api, client: &Mutex<Client>, bytes: &[u8]) {
    let mut client = client.lock().expect("a panic ends the process");
    client.begin();
    let mut numbers = Numbers(bytes);
    for _ in 0..REQUESTS {
        let (Some(which), Some(waits)) = (numbers.byte(), numbers.byte()) else { break };
        let (id, _) = api.functions[which as usize % api.functions.len()];
        let mut body = Vec::new();
        let small = |n: u64| if n < 200 { n % api.small } else { n };
        if (api.make)(id, &mut || small(numbers.next()), &mut body) {
            client.request(id, waits % 2 == 1, &body);
        }
    }
    client.end();
}

/// One input.
pub fn one(input: &[u8]) {
    // One session of each API for all inputs: a driver's state is never freed. Each input finds it as the first did.
    static CLIENTS: [OnceLock<Mutex<Client>>; 2] = [const { OnceLock::new() }; 2];
    let Some((mode, rest)) = input.split_first() else { return };
    match mode % 4 {
        0 => records(&OPENCL, rest),
        1 => requests(&OPENCL, CLIENTS[0].get_or_init(|| Mutex::new(Client::of_opencl())), rest),
        2 => records(&CUDA, rest),
        _ => requests(&CUDA, CLIENTS[1].get_or_init(|| Mutex::new(Client::of_cuda())), rest),
    }
}

tombolo_fuzz::entry!(one);

#[cfg(test)]
mod tests {
    use tombolo_fuzz::bytes;

    #[test]
    fn no_input_makes_a_session_panic_or_lets_the_driver_leave_the_window() {
        for seed in 1..=600u64 {
            let input: Vec<u8> = bytes(seed).take(200).collect();
            super::one(&input);
        }
    }
}
