-- Sets of slots as strings, put in front of the library that uses them: slot s is bit s % 8 of
-- byte s / 8; zero bytes at the end are cut off.

local function place(slot)
  return math.floor(slot / 8) + 1, 2 ^ (slot % 8)
end

local function has_bit(bitmap, slot)
  local index, mask = place(slot)
  return index <= #bitmap and bit.band(bitmap:byte(index), mask) ~= 0
end

local function with_bit(bitmap, slot)
  local index, mask = place(slot)
  bitmap = bitmap .. string.rep('\0', index - #bitmap)
  local byte = bit.bor(bitmap:byte(index), mask)
  return bitmap:sub(1, index - 1) .. string.char(byte) .. bitmap:sub(index + 1)
end

local function without_bit(bitmap, slot)
  local index, mask = place(slot)
  local byte = bit.band(bitmap:byte(index), 255 - mask)
  bitmap = bitmap:sub(1, index - 1) .. string.char(byte) .. bitmap:sub(index + 1)
  local last = #bitmap
  while last > 0 and bitmap:byte(last) == 0 do last = last - 1 end
  return bitmap:sub(1, last)
end

local function slots_of(bitmap)
  local slots = {}
  for index = 1, #bitmap do
    for low = 0, 7 do
      if bit.band(bitmap:byte(index), 2 ^ low) ~= 0 then slots[#slots + 1] = (index - 1) * 8 + low end
    end
  end
  return slots
end

local function band(a, b)
  local bytes = {}
  for index = 1, math.min(#a, #b) do
    bytes[index] = string.char(bit.band(a:byte(index), b:byte(index)))
  end
  return table.concat(bytes)
end
