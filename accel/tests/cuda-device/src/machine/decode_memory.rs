// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decodes loads, stores, atomics and address arithmetic.

use super::atomics::{Atomic, Update};
use super::decode::{Decoder, Result, Symbol};
use super::program::{Access, Op, SINK};
use super::rows::row;
use super::space::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::ptx::ast::{Instruction, Operand, Space};
use crate::ptx::types::Ty;

/// Where an address operand points.
struct Place {
    space: Space,
    row: u32,
    offset: i64,
    frame: bool,
}

fn space(modifiers: &[String]) -> Space {
    for modifier in modifiers {
        match modifier.split("::").next().unwrap_or_default() {
            "global" => return Space::Global,
            "shared" => return Space::Shared,
            "local" => return Space::Local,
            "const" => return Space::Const,
            "param" => return Space::Param,
            _ => {}
        }
    }
    Space::Generic
}

impl Decoder<'_> {
    /// Loads, stores, atomics, address conversions. False for other instructions.
    pub(super) fn memory(&mut self, instruction: &Instruction) -> Result<bool> {
        let Instruction { name, modifiers, operands, .. } = instruction;
        match (name.as_str(), operands.as_slice()) {
            ("ld" | "ldu", [to, from, ..]) => self.load(modifiers, to, from),
            ("st", [to, from, ..]) => self.store(modifiers, to, from),
            ("atom" | "red", _) => self.atomic(name == "red", modifiers, operands),
            ("cvta", [to, from]) => self.convert_address(modifiers, to, from),
            ("isspacep", [to, from]) => {
                let a = self.source(from, Ty::B64)?;
                let (d, _) = self.destination(to)?;
                self.emit(Op::IsSpace(space(modifiers)), d, [a, 0, 0], 0);
                Ok(true)
            }
            ("mapa", [to, from, ..]) => {
                // The only block of the cluster is this one.
                let a = self.source(from, Ty::B64)?;
                let (d, _) = self.destination(to)?;
                self.rows(row!(|a, _, _, _| a), d, [a, 0, 0], 0);
                Ok(true)
            }
            ("cp", [to, from, bytes, rest @ ..])
                if modifiers.iter().any(|modifier| modifier == "ca" || modifier == "cg") =>
            {
                let (to, from) = (self.place(Space::Shared, to)?, self.place(Space::Global, from)?);
                let Operand::Integer(bytes) = bytes else { return Ok(false) };
                let size = rest.first().map(|size| self.source(size, Ty::U32)).transpose()?;
                let a = self.plus(to.row, to.offset);
                let b = self.plus(from.row, from.offset);
                self.emit(Op::CopyAsync { size }, 0, [a, b, 0], *bytes);
                Ok(true)
            }
            ("cp", _)
                if modifiers.iter().any(|modifier| {
                    modifier == "commit_group" || modifier == "wait_group" || modifier == "wait_all"
                }) =>
            {
                self.emit(Op::Nop, 0, [0; 3], 0);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    pub(super) fn plus(&mut self, row: u32, offset: i64) -> u32 {
        if offset == 0 {
            return row;
        }
        let (b, d) = (self.constant(offset as u64), self.new_row());
        self.rows(row!(|a, b, _, _| a.wrapping_add(b)), d, [row, b, 0], 0);
        d
    }

    fn place(&mut self, space: Space, operand: &Operand) -> Result<Place> {
        let Operand::Memory { base, offset, .. } = operand else { return self.fail("not an address") };
        let named = if let Operand::Name(name) = base.as_ref() { self.lookup(name) } else { None };
        // A kernel's parameters are one buffer; a function's are in the frame, like local memory.
        let in_frame = !self.entry || matches!(named, Some(Symbol::Frame { .. }));
        let space = if space == Space::Param && in_frame { Space::Local } else { space };
        Ok(match named {
            Some(Symbol::Frame { offset: at, .. }) => {
                Place { space: Space::Local, row: 0, offset: offset + i64::from(at), frame: true }
            }
            _ => Place { space, row: self.source(base, Ty::B64)?, offset: *offset, frame: false },
        })
    }

    fn load(&mut self, modifiers: &[String], to: &Operand, from: &Operand) -> Result<bool> {
        let Some(ty) = modifiers.last().and_then(|ty| Ty::parse(ty)) else { return Ok(false) };
        if ty == Ty::B128 {
            return Ok(false);
        }
        let place = self.place(space(modifiers), from)?;
        let targets =
            if let Operand::Vector(targets) = to { targets.as_slice() } else { std::slice::from_ref(to) };
        let (mut rows, mut mask) = (Vec::new(), u64::MAX);
        for target in targets {
            if let Operand::Sink = target {
                rows.push(SINK);
                continue;
            }
            let (row, bits) = self.destination(target)?;
            rows.push(row);
            mask = bits;
        }
        let Place { space, row, offset, frame } = place;
        let access = Access {
            space,
            bytes: ty.size() as u8,
            signed: ty.is_signed(),
            rows: rows.into(),
            mask,
            offset,
            frame,
        };
        self.emit(Op::Load(Box::new(access)), 0, [row, 0, 0], 0);
        Ok(true)
    }

    fn store(&mut self, modifiers: &[String], to: &Operand, from: &Operand) -> Result<bool> {
        let Some(ty) = modifiers.last().and_then(|ty| Ty::parse(ty)) else { return Ok(false) };
        if ty == Ty::B128 {
            return Ok(false);
        }
        let place = self.place(space(modifiers), to)?;
        let sources =
            if let Operand::Vector(sources) = from { sources.as_slice() } else { std::slice::from_ref(from) };
        let mut rows = Vec::new();
        for source in sources {
            rows.push(self.source(source, ty)?);
        }
        let Place { space, row, offset, frame } = place;
        let access = Access {
            space,
            bytes: ty.size() as u8,
            signed: false,
            rows: rows.into(),
            mask: u64::MAX,
            offset,
            frame,
        };
        self.emit(Op::Store(Box::new(access)), 0, [row, 0, 0], 0);
        Ok(true)
    }

    fn atomic(&mut self, no_result: bool, modifiers: &[String], operands: &[Operand]) -> Result<bool> {
        let Some(update) = modifiers.iter().find_map(|modifier| Update::parse(modifier)) else {
            return Ok(false);
        };
        let Some(ty) = modifiers.iter().rev().find_map(|modifier| Ty::parse(modifier)) else {
            return Ok(false);
        };
        if ty == Ty::B128 {
            return Ok(false);
        }
        let (to, operands) = match operands.split_first() {
            Some((to, rest)) if !no_result => (Some(to), rest),
            _ => (None, operands),
        };
        let [address, values @ ..] = operands else { return self.fail("an atomic needs an address") };
        let place = self.place(space(modifiers), address)?;
        let (mut elements, mut b, mut c, mut d) = (Vec::new(), 0, 0, SINK);
        match (values.first(), to) {
            (Some(Operand::Vector(values)), to) => {
                for (at, value) in values.iter().enumerate() {
                    let d = match to {
                        Some(Operand::Vector(targets)) => self.destination(&targets[at])?.0,
                        _ => SINK,
                    };
                    elements.push((d, self.source(value, ty)?));
                }
            }
            (Some(value), to) => {
                b = self.source(value, ty)?;
                c = if update == Update::CompareExchange {
                    self.source(values.get(1).unwrap_or(&Operand::Sink), ty)?
                } else {
                    0
                };
                if let Some(to @ Operand::Name(_)) = to {
                    d = self.destination(to)?.0;
                }
            }
            _ => return self.fail("an atomic needs a value"),
        }
        let Place { space, row, offset, frame } = place;
        self.emit(
            Op::Atomic(Box::new(Atomic { space, update, ty, offset, frame, elements: elements.into() })),
            d,
            [row, b, c],
            0,
        );
        Ok(true)
    }

    /// cvta adds a window's start, cvta.to takes it away; global and constant addresses are generic ones.
    fn convert_address(&mut self, modifiers: &[String], to: &Operand, from: &Operand) -> Result<bool> {
        let window = match space(modifiers) {
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Param if self.entry => PARAM_WINDOW,
            Space::Param => LOCAL_WINDOW,
            _ => 0,
        };
        let away = modifiers.iter().any(|modifier| modifier == "to");
        let a = self.source(from, Ty::B64)?;
        let (d, mask) = self.destination(to)?;
        let b = self.constant(if away { window.wrapping_neg() } else { window });
        let c = self.constant(mask);
        self.rows(row!(|a, b, c, _| a.wrapping_add(b) & c), d, [a, b, c], 0);
        Ok(true)
    }
}
