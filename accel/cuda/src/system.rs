// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The connection to the server, and the devices that the program sees.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tombolo_accel_client::connect::{VARIABLE, address, connect};
use tombolo_accel_client::connection::{Connection, Lost};
use tombolo_accel_client::trace;
use tombolo_accel_spec::common::Snapshot;
use tombolo_accel_spec::cuda::{self as wire, cu};
use tombolo_accel_spec::wire::{Decoder, Malformed};
use tombolo_calls::say;

/// A device, as the server told of it at the beginning.
pub struct Device {
    /// Its place among the server's.
    pub ordinal: i32,
    pub name: Vec<u8>,
    pub uuid: [u8; 16],
    /// Bytes that this client may have of it at most.
    pub memory: u64,
    /// By number: the driver's code, and the value.
    pub attributes: Vec<(i32, i32)>,
}

impl Device {
    /// The value of an attribute.
    pub fn attribute(&self, number: u32) -> Result<i32, i32> {
        match self.attributes.get(number as usize) {
            Some((cu::CUDA_SUCCESS, value)) => Ok(*value),
            Some((code, _)) => Err(*code),
            None => Err(cu::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// PCI domain, bus and device.
    pub fn place(&self) -> [i32; 3] {
        let numbers = [
            cu::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            cu::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            cu::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
        ];
        numbers.map(|number| self.attribute(number).unwrap_or(0))
    }
}

pub struct System {
    pub connection: Arc<Connection>,
    /// The version of the server's driver.
    pub version: i32,
    /// In the order of CUDA_VISIBLE_DEVICES.
    pub devices: Vec<Device>,
}

static SYSTEM: OnceLock<Result<System, i32>> = OnceLock::new();
static INITIALIZED: AtomicBool = AtomicBool::new(false);

/// The server and its devices; connects at the first call.
pub fn system() -> Result<&'static System, i32> {
    SYSTEM.get_or_init(establish).as_ref().map_err(|code| *code)
}

/// The same for a function that a program may call only after cuInit.
pub fn initialized() -> Result<&'static System, i32> {
    if INITIALIZED.load(Ordering::Acquire) { system() } else { Err(cu::CUDA_ERROR_NOT_INITIALIZED) }
}

/// cuInit
pub fn initialize() -> Result<(), i32> {
    if system()?.devices.is_empty() {
        return Err(cu::CUDA_ERROR_NO_DEVICE);
    }
    INITIALIZED.store(true, Ordering::Release);
    Ok(())
}

fn establish() -> Result<System, i32> {
    if std::env::var_os("TOMBOLO_ACCEL_SERVER").is_some() {
        // Inside a server: its devices are native ones, never ours.
        return Err(cu::CUDA_ERROR_NO_DEVICE);
    }
    let address = address();
    greet(&address).map_err(|why| {
        say!(
            "tombolo: no CUDA from the accelerator server at {address}: {why}; start one with 'tombolo accel serve' or set {VARIABLE}"
        );
        cu::CUDA_ERROR_NO_DEVICE
    })
}

fn greet(address: &str) -> Result<System, String> {
    let link = connect(address, wire::API, wire::IDENTITY).map_err(|e| e.to_string())?;
    let connection = Connection::new(link).map_err(|e| e.to_string())?;
    connection.print_by_stdio();
    trace::at_end(write_trace);
    let snapshot = connection.call(&Snapshot {}, |status, body| (status, body.to_vec()));
    let (status, body) = snapshot.map_err(|Lost| "the server went away during the handshake".to_string())?;
    if status != wire::SUCCESS {
        return Err(format!("the server has no usable CUDA (code {status}); see its log"));
    }
    let (version, devices) =
        decode(&body).map_err(|Malformed| "the server's snapshot can't be decoded".to_string())?;
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    Ok(System { connection, version, devices: chosen(devices, visible.as_deref()) })
}

extern "C" fn write_trace() {
    if let Ok(system) = system() {
        trace::write(&system.connection, wire::FUNCTIONS);
    }
}

fn decode(body: &[u8]) -> Result<(i32, Vec<Device>), Malformed> {
    let mut from = Decoder::new(body);
    let version = from.i32()?;
    let mut devices = Vec::new();
    for ordinal in 0..from.u32()? {
        let name = from.bytes()?.to_vec();
        let uuid = from.bytes()?.try_into().map_err(|_| Malformed)?;
        let memory = from.u64()?;
        let (codes, values) = (from.i32s()?, from.i32s()?);
        let attributes = codes.iter().copied().zip(values.iter().copied()).collect();
        devices.push(Device { ordinal: ordinal as i32, name, uuid, memory, attributes });
    }
    from.end()?;
    Ok((version, devices))
}

/// The devices that a list names, by number or by the beginning of `GPU-` and the UUID, in the list's order; it ends at the first name of no device.
fn chosen(devices: Vec<Device>, list: Option<&str>) -> Vec<Device> {
    let Some(list) = list else { return devices };
    let mut left: Vec<Option<Device>> = devices.into_iter().map(Some).collect();
    let mut taken = Vec::new();
    for name in list.split(',').map(str::trim) {
        let is_named = |device: &Device| match name.parse::<i32>() {
            Ok(number) => device.ordinal == number,
            Err(_) => name.len() > 4 && text(&device.uuid).starts_with(name),
        };
        let found = left.iter_mut().find(|device| device.as_ref().is_some_and(is_named));
        let Some(device) = found.and_then(Option::take) else { break };
        taken.push(device);
    }
    taken
}

/// `GPU-` and the UUID.
fn text(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parts = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex);
    format!("GPU-{}", parts.join("-"))
}
